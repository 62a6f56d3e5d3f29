"""What is measured, and how large it is: read by every side from the same words."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from corral.recipe.schema import DtypeName

SEED = 0


@dataclass(frozen=True)
class RolloutWork:
    """Requests with prompts of one length, and as many new tokens as each is told; none ends earlier."""

    name: str
    num_requests: int
    prompt_tokens: int
    least_new: int
    most_new: int
    repeats: int | None = None
    """None: as many as were asked for."""

    def prompts(self, vocab_size: int, repeat: int) -> list[list[int]]:
        """Other ones for every repeat, the same for all sides."""
        dice = random.Random(f"{SEED} {self.name} {repeat}")
        return [[dice.randrange(vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.num_requests)]

    def lengths(self) -> list[int]:
        dice = random.Random(f"{SEED} {self.name} lengths")
        return [dice.randint(self.least_new, self.most_new) for _ in range(self.num_requests)]

    def num_decode_steps(self, max_sequences: int) -> int:
        """Fewest in which it can be done, with so many sequences at a time."""
        return max(*self.lengths(), math.ceil(sum(self.lengths()) / max_sequences))


@dataclass(frozen=True)
class TrainWork:
    num_sequences: int
    length: int
    warm_up: int
    measured: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.length

    def sequences(self, vocab_size: int) -> list[list[int]]:
        """One token longer than what is read: the last one is only predicted."""
        dice = random.Random(f"{SEED} train")
        return [[dice.randrange(vocab_size) for _ in range(self.length + 1)] for _ in range(self.num_sequences)]


@dataclass(frozen=True)
class StepWork:
    num_prompts: int
    num_samples: int
    prompt_tokens: int
    num_new: int
    steps: int
    """Measured, besides the first, which is warm-up."""

    @property
    def num_trajectories(self) -> int:
        return self.num_prompts * self.num_samples

    @property
    def num_tokens(self) -> int:
        return self.num_trajectories * self.num_new


ROLLOUT = (
    RolloutWork("fixed-128", num_requests=128, prompt_tokens=128, least_new=256, most_new=256),
    RolloutWork("fixed-512", num_requests=512, prompt_tokens=128, least_new=256, most_new=256),
    RolloutWork("ragged", num_requests=2048, prompt_tokens=128, least_new=32, most_new=1024, repeats=1),
)
SMALL_ROLLOUT = (
    RolloutWork("fixed-128", num_requests=3, prompt_tokens=6, least_new=4, most_new=4),
    RolloutWork("fixed-512", num_requests=6, prompt_tokens=6, least_new=4, most_new=4),
    RolloutWork("ragged", num_requests=12, prompt_tokens=6, least_new=2, most_new=8, repeats=1),
)
WORKLOADS = tuple(work.name for work in ROLLOUT)
TRAIN = TrainWork(num_sequences=8, length=1024, warm_up=3, measured=10)
SMALL_TRAIN = TrainWork(num_sequences=2, length=12, warm_up=1, measured=2)
STEP = StepWork(num_prompts=64, num_samples=8, prompt_tokens=128, num_new=256, steps=3)
SMALL_STEP = StepWork(num_prompts=2, num_samples=4, prompt_tokens=8, num_new=4, steps=1)


@dataclass(frozen=True)
class Peers:
    """How the others are run, where there is a choice."""

    trl_micro_batch: int = 16
    """Samples of a backward pass."""
    trl_dtype: str = "float32"
    """Of TRL's weights; it computes in bfloat16 either way. float32 is what Corral's masters are."""
    trl_checkpointing: bool = False
    trl_correction: bool = False
    """TRL's importance correction for what the engine's log-probs differ from the trainer's, which is its default, and
    another forward pass. (Corral's ratios are against the engine's log-probs.)"""
    trl_vllm_memory: float = 0.3
    """Share of the device that TRL gives to vLLM."""
    vllm_memory: float = 0.9
    """Share of the device that vLLM gets where it is alone."""
    transformers_new: int = 64
    """New tokens for transformers' `generate`, which is slow; its tokens/s are compared."""


@dataclass(frozen=True)
class Settings:
    verb: str
    model: str
    """A shape by its name, or a folder."""
    folder: str
    """In which the model is."""
    device: str
    """cuda or cpu."""
    dtype: DtypeName
    smoke: bool = False
    repeats: int = 2
    workloads: tuple[str, ...] = WORKLOADS
    max_sequences: int = 1024
    max_prefill_tokens: int = 8192
    micro_batch_tokens: int = 8192
    """Of Corral's backward passes in a step."""
    steps: int = STEP.steps
    timeout_s: float = 600.0
    """For one side."""
    peers: Peers = field(default_factory=Peers)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        values: dict[str, Any] = json.loads(text)
        values |= {"workloads": tuple(values["workloads"]), "peers": Peers(**values["peers"])}
        return cls(**values)

    @property
    def rollout(self) -> Sequence[RolloutWork]:
        return [work for work in (SMALL_ROLLOUT if self.smoke else ROLLOUT) if work.name in self.workloads]

    @property
    def train(self) -> TrainWork:
        return SMALL_TRAIN if self.smoke else TRAIN

    @property
    def step(self) -> StepWork:
        if self.smoke:
            return SMALL_STEP
        return StepWork(STEP.num_prompts, STEP.num_samples, STEP.prompt_tokens, STEP.num_new, self.steps)
