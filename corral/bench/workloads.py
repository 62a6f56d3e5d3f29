"""What `corral bench` measures and how large it is: every side reads it from the same settings.

Standard library only: it is also imported by reward processes, and by a Python that has vLLM and not Corral's
dependencies.
"""

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corral.recipe.schema import DtypeName

SEED = 0


@dataclass(frozen=True)
class RolloutWork:
    """Prompts of one length, and a number of new tokens for each sample; no sample ends earlier."""

    name: str
    num_prompts: int
    prompt_tokens: int
    min_new_tokens: int
    max_new_tokens: int
    num_samples: int = 1  # samples of each prompt
    repeats: int | None = None  # how often it is measured; None leaves it to the settings

    @property
    def num_requests(self) -> int:
        return self.num_prompts * self.num_samples

    def prompts(self, vocab_size: int, repeat: int) -> list[list[int]]:
        """A prompt for each request: new ones for every repeat, against prefix caches; the same for all sides."""
        rng = random.Random(f"{SEED} {self.name} {repeat}")
        prompts = [[rng.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.num_prompts)]
        return [prompt for prompt in prompts for _ in range(self.num_samples)]

    def lengths(self) -> list[int]:
        """Number of new tokens of each request."""
        rng = random.Random(f"{SEED} {self.name} lengths")
        return [rng.randint(self.min_new_tokens, self.max_new_tokens) for _ in range(self.num_requests)]

    def num_decode_steps(self, max_sequences: int) -> int:
        """Fewest decode steps in which it can be done, with `max_sequences` at a time."""
        return max(*self.lengths(), math.ceil(sum(self.lengths()) / max_sequences))


@dataclass(frozen=True)
class TrainWork:
    """A batch of sequences of one length, and how many steps are taken on it."""

    num_sequences: int
    length: int
    warm_up: int
    measured: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.length

    def sequences(self, vocab_size: int) -> list[list[int]]:
        """Random sequences, one token longer than `length`: the last token is only predicted."""
        rng = random.Random(f"{SEED} train")
        return [[rng.randrange(vocab_size) for _ in range(self.length + 1)] for _ in range(self.num_sequences)]


@dataclass(frozen=True)
class StepWork:
    """The batch of a GRPO step."""

    num_prompts: int = 64
    num_samples: int = 8
    prompt_tokens: int = 128
    new_tokens: int = 256
    shared_tokens: int = 0  # tokens at the beginning of all prompts, such as those of a chat template
    steps: int = 3  # measured steps, besides the first, which is warm-up
    lora_rank: int = 0  # rank of adapters on all linear layers; 0: the whole model is trained

    @property
    def num_trajectories(self) -> int:
        return self.num_prompts * self.num_samples

    @property
    def num_tokens(self) -> int:
        return self.num_trajectories * self.new_tokens


GPU_WORKLOADS = ("fixed-128", "fixed-512", "ragged")
CPU_WORKLOADS = ("distinct", "grouped")
ROLLOUT = (
    RolloutWork("fixed-128", 128, prompt_tokens=128, min_new_tokens=256, max_new_tokens=256),
    RolloutWork("fixed-512", 512, prompt_tokens=128, min_new_tokens=256, max_new_tokens=256),
    RolloutWork("ragged", 2048, prompt_tokens=128, min_new_tokens=32, max_new_tokens=1024, repeats=1),
    RolloutWork("distinct", 64, prompt_tokens=64, min_new_tokens=64, max_new_tokens=64),
    RolloutWork("grouped", 8, prompt_tokens=128, min_new_tokens=32, max_new_tokens=32, num_samples=16),
)
SMALL_ROLLOUT = (
    RolloutWork("fixed-128", 3, prompt_tokens=6, min_new_tokens=4, max_new_tokens=4),
    RolloutWork("fixed-512", 6, prompt_tokens=6, min_new_tokens=4, max_new_tokens=4),
    RolloutWork("ragged", 12, prompt_tokens=6, min_new_tokens=2, max_new_tokens=8, repeats=1),
    RolloutWork("distinct", 4, prompt_tokens=6, min_new_tokens=4, max_new_tokens=4),
    RolloutWork("grouped", 2, prompt_tokens=6, min_new_tokens=4, max_new_tokens=4, num_samples=2),
)
WORKLOADS = tuple(work.name for work in ROLLOUT)
TRAIN = TrainWork(num_sequences=8, length=1024, warm_up=3, measured=10)
SMALL_TRAIN = TrainWork(num_sequences=2, length=12, warm_up=1, measured=2)
SMALL_STEP = StepWork(num_prompts=2, num_samples=4, prompt_tokens=8, new_tokens=4, steps=1)


@dataclass(frozen=True)
class PeerOptions:
    """How the other libraries are run, where there is a choice."""

    trl_micro_batch: int = 16  # samples of a backward pass of TRL
    trl_dtype: str = "float32"
    """Dtype of TRL's weights; on a GPU it computes in bfloat16 either way. Corral's master weights are float32."""
    trl_checkpointing: bool = False  # whether TRL uses gradient checkpointing
    trl_correction: bool = False
    """Whether TRL corrects for the difference between the engine's log-probs and the trainer's: its default, and
    another forward pass. (Corral's ratios are against the engine's log-probs.)"""
    trl_vllm_memory: float = 0.3  # fraction of the device's memory that TRL gives to vLLM
    vllm_memory: float = 0.9  # fraction of the device's memory that vLLM gets where it is alone
    vllm_block_size: int | None = None
    """Tokens of a block of vLLM's KV cache; None leaves it to vLLM. A shared prefix is shared in whole blocks."""
    vllm_python: str | None = None  # a Python that has vLLM, where it is not this one
    sglang_python: str | None = None  # a Python that has SGLang, where it is not this one
    sglang_memory: float = 0.8  # fraction of the device's memory that SGLang gets for weights and cache
    transformers_new_tokens: int = 64
    """New tokens for transformers' `generate` in the fixed workloads: it is slow, and its tokens/s are compared."""

    def python_of(self, side: str) -> str | None:
        """The interpreter of a side, where it is not this one."""
        return {"vllm": self.vllm_python, "sglang": self.sglang_python}.get(side)


@dataclass(frozen=True)
class BenchSettings:
    verb: str  # `rollout`, `train` or `step`
    model: str  # a shape by its name, a built-in model, or a folder
    folder: str  # folder of the model
    device: str  # `cuda` or `cpu`
    dtype: "DtypeName"
    smoke: bool = False
    rounds: int = 1  # how often each side has its turn: A B A B, so that what else the machine does hits all of them
    repeats: int = 2
    workloads: tuple[str, ...] = GPU_WORKLOADS
    max_sequences: int = 1024
    max_prefill_tokens: int = 8192
    micro_batch_tokens: int = 8192  # tokens of a backward pass of Corral in `step`
    step: StepWork = field(default_factory=StepWork)
    timeout_s: float = 600.0  # limit for one turn of one side
    peers: PeerOptions = field(default_factory=PeerOptions)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BenchSettings":
        values: dict[str, Any] = json.loads(text)
        values["workloads"] = tuple(values["workloads"])
        values |= {"peers": PeerOptions(**values["peers"]), "step": StepWork(**values["step"])}
        return cls(**values)

    @property
    def rollout(self) -> Sequence[RolloutWork]:
        return [work for work in (SMALL_ROLLOUT if self.smoke else ROLLOUT) if work.name in self.workloads]

    @property
    def train(self) -> TrainWork:
        return SMALL_TRAIN if self.smoke else TRAIN


def hash_reward(response: str) -> float:
    """A number in [0, 1) that depends on the text alone: different samples get different rewards, so that no sample has
    advantage 0, and no side can leave one out."""
    return int.from_bytes(hashlib.blake2b(response.encode(), digest_size=4).digest(), "big") / 2**32
