"""The recipe: every key a user may write, with its type, default and meaning.

Strict: a key that is not here is an error. This module only describes; reading YAML and overrides is `load.py`, checks
across keys are `rules.py`, and what follows from a recipe is `plan.py`. The text under a field is its entry in the
reference (`docs/recipe.md`). A field left at None means "decided elsewhere": by the algorithm's preset, by the model,
or not used at all.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticKnownError

from corral.recipe.parts import PRESETS, KLPlace

PositiveInt = Annotated[int, Field(ge=1)]
NaturalInt = Annotated[int, Field(ge=0)]
MAX_TOP_K = 2**31 - 1
"""Largest `top_k`: 32 bits hold it, and no vocabulary has as many tokens."""
PositiveFloat = Annotated[float, Field(gt=0)]
NaturalFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]

TemplateName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Part = Literal["train", "validation"]
if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[tuple(PRESETS)]


class Section(BaseModel):
    """A part of the recipe: no unknown keys, nothing changed after reading."""

    # Options of the user's own may be infinite, and are written as they are: pydantic's default writes null.
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class Lora(Section):
    """Low-rank adapters: the model's own weights stay as they are, and small matrices beside them are trained."""

    rank: PositiveInt = 32
    """Rank of the matrices."""
    alpha: PositiveFloat | None = None
    """What an adapter computes is multiplied by `alpha / rank`. None: twice the rank."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers that get an adapter, by the ends of their names: `[q_proj, v_proj, experts.down_proj]`. all-linear:
    all of the language model with its experts, without its head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of an adapter's inputs that training sets to zero. The engine knows no dropout, so above 0 the log-probs
    of training are not those of sampling. Adapters of experts have none."""
    rslora: bool = False
    """Multiply by `alpha / sqrt(rank)` instead, for high ranks."""

    @property
    def resolved_alpha(self) -> float:
        return 2.0 * self.rank if self.alpha is None else self.alpha


class Quantization(Section):
    """The frozen weights beside adapters in fewer bits, as bitsandbytes has them (QLoRA)."""

    bits: Literal[4, 8] = 4
    """4: NF4 in blocks of 64. 8: int8 in rows."""


class Model(Section):
    """The model that is trained."""

    path: str
    """A folder in Hugging Face layout, a GGUF file, a hub name, `ms:owner/name` on ModelScope, or a built-in model:
    `smollm2-135m-instruct`, or `blank-1m`, which reads bytes and is not trained yet. A folder with a LoRA adapter in
    PEFT's layout is its base model with the adapter: merged, or with `lora` to go on from."""
    lora: Lora | None = None
    quantization: Quantization | None = None
    """Only with `lora`, and with whole models on devices."""
    dtype: DtypeName = "auto"
    """Type of weights and computation; the optimizer keeps float32 copies of smaller ones, and float16 scales the loss.
    auto: bfloat16 where the device is fast at it, else float32."""
    exact: bool = False
    """Compute attention in float64, so that the engine's log-probs are the trainer's to the last bit. For float32 only,
    and only where the matrix library sums in a fixed order, as OpenBLAS does. Attention costs twice as much."""
    implementation: Literal["auto", "general"] = "auto"
    """auto: the fast path for families that have one, else the general one, which computes every sequence by itself,
    with transformers' own forward pass. general: always that one, to compare with."""
    chat_template: str | None = None
    """A Jinja template, or the path of a file with one, instead of the tokenizer's own."""
    chat_template_arguments: dict[TemplateName, Any] = {}
    """Variables of the chat template: `{enable_thinking: false}`."""
    config_overrides: dict[str, Any] = {}
    """Changes to the model's configuration: `{rope_parameters: {rope_type: yarn, factor: 4.0, rope_theta: 1000000.0,
    original_max_position_embeddings: 32768}, max_position_embeddings: 131072}`. Checkpoints are written with them."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. It can do anything your account can."""


Range = tuple[float | None, float | None]
"""Lowest and highest value; None: no bound."""


class SourceRows(Section):
    """Where rows come from: files (parquet, jsonl; globs allowed), a data set on a hub, a generated task, or a Python
    function."""

    path: str | list[str]
    """`rows.parquet`, `data/*.jsonl`, `rows.csv`, `hf:openai/gsm8k`, `ms:modelscope/gsm8k` (ModelScope),
    `reasoning_gym:chain_sum`, `arithmetic:addition`, `pictures:colors`, `module:function`, or
    `boards`: numbers from which a game's environment makes its boards."""
    split: str | None = None
    """Split of a hub data set."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    options: dict[str, Any] = {}
    """Arguments of a generated task or of the function."""
    size: PositiveInt | None = None
    """Number of rows to generate (generated tasks and boards only)."""
    seed: NaturalInt = 0
    """Seed of a generated task, or of boards: other seeds give other boards."""
    max_rows: PositiveInt | None = None
    """Use at most so many rows of the source, from its beginning; what `filters` leave out does not count."""
    filters: dict[str, Range] = {}
    """Leave out rows in which a column's number lies outside a range: `{pass_rate: [0.1, 0.9]}`. null is no bound. How
    many were left out is printed."""

    @property
    def hub_name(self) -> str | None:
        """Name of a data set on a hub, or a folder in such a layout: what follows `hf:`, all of `ms:owner/name`, or
        `owner/name` without the ending of a file, where nothing of that name is here."""
        if isinstance(self.path, list):
            return None
        if self.path.startswith("hf:"):
            return self.path.removeprefix("hf:") or None
        if self.path.startswith("ms:"):
            return self.path
        is_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", self.path) and not re.search(r"\.[A-Za-z]\w*$", self.path)
        return self.path if is_name and not Path(self.path).exists() else None


class WeightedSource(SourceRows):
    """One of several sources; `*` is its name. It has the keys of `data.train`, and:"""

    weight: PositiveFloat | None = None
    """Part of the prompts that are drawn from this source, relative to the weights of the others; all have one, or
    none. None: rows of all sources are drawn as if they were one. For training only."""


class Source(SourceRows):
    """Rows: files (parquet, jsonl; globs allowed), a data set on a hub, a generated task, a Python function, or several
    of these."""

    path: str | list[str] = []
    sources: dict[str, WeightedSource] = {}
    """Several sources, by a name of your choice, instead of `path`. Metrics have the names, and rows without a column
    `data_source` have the name as theirs."""

    @model_validator(mode="after")
    def has_rows(self) -> "Source":
        if not self.model_fields_set & {"path", "sources"}:
            raise PydanticKnownError("missing")
        return self

    @property
    def named_sources(self) -> dict[str, SourceRows]:
        """By name; the only one has none."""
        return dict(self.sources) or {"": self}

    def first_rows(self, number: int) -> "Source":
        """The same with at most so many rows of each source."""

        def limited(source: SourceRows) -> SourceRows:
            return source.model_copy(update={"max_rows": min(source.max_rows or number, number)})

        if not self.sources:
            return cast(Source, limited(self))
        return self.model_copy(update={"sources": {name: limited(one) for name, one in self.sources.items()}})


class Curriculum(Section):
    """Which rows come when, by how hard they are. What is skipped is counted (`samples/skipped`) and in the ledger."""

    order_by: str | None = None
    """Column with a number; each epoch goes from its lowest values to its highest, and rows with equal ones are
    shuffled."""
    descending: bool = False
    """Go from the highest values of `order_by` to the lowest, for a column such as a pass rate."""
    mean_reward: tuple[float, float] | None = None
    """Prefer rows whose mean reward in this run so far lies in this range, bounds included, or is not known yet. Others
    are drawn in only a part of the epochs (`others`)."""
    others: Fraction = 0.1
    """Fraction of the epochs in which a row outside of `mean_reward` is drawn."""
    skip_solved: PositiveInt | None = None
    """Skip a row for the rest of the run once all its samples were solved so many times in a row. If that leaves no
    row, all come back."""
    skip_failed: PositiveInt | None = None
    """Skip a row for the rest of the run once all its samples failed so many times in a row."""
    solved_reward: float = 1.0
    """A reward of at least this counts as solved."""
    failed_reward: float = 0.0
    """A reward of at most this counts as failed."""

    @property
    def uses_rewards(self) -> bool:
        return any(value is not None for value in (self.mean_reward, self.skip_solved, self.skip_failed))


class Data(Section):
    """The prompts, and what is known about them."""

    train: Source
    validation: Source | None = None
    prompt_key: str = "prompt"
    """Column with the question: text, or a list of chat messages, also as JSON text."""
    answer_key: str | None = None
    """Column with the reference answer. None: `answer`, else verl's `reward_model.ground_truth`."""
    source_key: str = "data_source"
    """Column that says where a row is from, for rewards and metrics by source. Rows without it have the name
    of their source in the recipe."""
    completion_key: str | None = None
    """Column with the answer to train on (`algorithm.name: sft`). None: `completion`, else the reference answer; rows
    with a column `messages` are whole conversations. See [supervised fine-tuning](sft.md#data)."""
    chosen_key: str = "chosen"
    """Column with the chosen answer of a pair (`algorithm.name: dpo`, `ipo`, `simpo`): text, or chat messages. See
    [preferences](preferences.md#data)."""
    rejected_key: str = "rejected"
    """Column with the other answer of a pair."""
    images_key: str = "images"
    """Column with the images of the prompt, for models that read images: paths (relative to the data file) or bytes.
    `<image>` in the prompt's text says where each of them is; without it they come first."""
    tools_key: str | None = "tools"
    """Column with the functions that the model may call in this row, a list or JSON text, for the chat template. null:
    there is none."""
    system: str | None = None
    """System message put before every prompt."""
    template: str | None = None
    """Text with `{prompt}` in it, put around the last user message."""
    chat: bool = True
    """Render prompts with the chat template. False: the prompt's text is tokenized as it is."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt in tokens, after the chat template. Where rows are trained on (`algorithm.name: sft`, `dpo`, ...),
    longest prompt with an answer."""
    overlong: Literal["error", "filter", "truncate_left", "truncate_right"] = "error"
    """What happens to a prompt (with `sft`, `dpo`, ..., a row) of more tokens than `max_prompt_tokens`. Such ones are
    counted and reported."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What happens to a row that cannot be read: broken JSON, no prompt, messages that are none, or what the chat
    template refuses. skip: it is left out; how many were, and which came first, is a warning, and all of them are in
    the run's log."""
    shuffle: bool = True
    """Order rows differently in every epoch; the order follows from `seed` and the epoch's number."""
    curriculum: Curriculum = Curriculum()

    @property
    def all_sources(self) -> dict[tuple[str, ...], SourceRows]:
        """Every source of training and validation, by its key."""
        parts = {"train": self.train} | ({} if self.validation is None else {"validation": self.validation})
        return {
            ("data", part, *(("sources", name) if name else ())): one
            for part, source in parts.items()
            for name, one in source.named_sources.items()
        }


class Reward(Section):
    """The function that scores answers."""

    name: str = "exact"
    """exact, regex, number, gsm8k, math, geo3k, reasoning_gym, em, sub_em, f1, search_r1, judge, code, by_source (one
    of them, by the row's `data_source`), `module:function` / `file.py:function`, or reward_model: the score of the
    classifier that the section `reward_model` names."""
    options: dict[str, Any] = {}
    """Keyword arguments for the reward function."""
    timeout_s: PositiveFloat = 10.0
    """Seconds after which a call of the reward function is killed and the sample gets `on_error`."""
    workers: PositiveInt = 2
    """Processes that run the reward function."""
    concurrency: PositiveInt = 256
    """Calls of an `async` reward function in flight at once in each process; others wait in line, which does not count
    as running."""
    on_error: float | Literal["drop"] = 0.0
    """Reward of a sample whose reward function raised or hung, or whose conversation the reward model cannot score.
    drop: it has none, and is not trained on."""

    @property
    def is_model(self) -> bool:
        """Whether it is the score of the reward model, and no function's."""
        return self.name == "reward_model"


class WeightedReward(Reward):
    """One of several rewards; `*` is its name. It has the keys of `environment.reward`, and:"""

    weight: float = 1.0
    """Factor of this reward in the sum."""
    sources: list[str] | None = None
    """The reward is for rows with one of these as `data_source` (`data.source_key`). None: for all rows."""

    def is_for(self, source: str) -> bool:
        """Whether rows of that `data_source` have this reward."""
        return self.sources is None or source in self.sources


class Environment(Section):
    """What answers the model, and how its answers are rewarded."""

    name: str = "question"
    """question, frozen_lake, sokoban, search, tools, agent, gymnasium, reasoning_gym, or `module:Class`."""
    options: dict[str, Any] = {}
    """Arguments of the environment's class."""
    reward: Reward = Reward()
    rewards: dict[str, WeightedReward] = {}
    """Several rewards, by a name of your choice, instead of `reward`. A sample's reward is the sum of those that are
    for its row, each times its weight; metrics have the names."""
    max_error_rate: Annotated[float, Field(ge=0, le=1)] | None = 0.5
    """The run stops if a larger fraction of the samples of any step or validation failed: if the reward function, the
    environment or an agent raised, hung, died or returned what is no number. It also stops if all samples of the first
    step did. null: it goes on whatever fails."""
    timeout_s: PositiveFloat = 60.0
    """Seconds that one reset or step may take."""
    concurrency: PositiveInt | None = None
    """Trajectories in progress at the same time on a worker. None: all of them."""
    processes: PositiveInt = 8
    """For an environment whose methods block: trajectories in progress at the same time, each in its own process. With
    `tools`: functions that run at the same time."""
    env: list[str] = []
    """Names of environment variables that rewards, environments, tools and agents get besides `PATH`, `HOME` and others
    that are no secret."""

    @property
    def named_rewards(self) -> "dict[str, Reward]":
        """By name; the only one has none."""
        return dict(self.rewards) or {"": self.reward}


class TaggedEnvironment(Environment):
    """One of several environments; `*` is its tag. It has the keys of `environment`, and:"""

    weight: NaturalFloat = 1.0
    """Mixing weight of the environment's boards, relative to those of the others (`path: boards`; rows of other
    sources name their environment in a column `environment`). 0: none."""
    validation_weight: NaturalFloat | None = None
    """Mixing weight of the environment's boards in validation. None: as `weight`."""


MAX_SEQUENCES = {"cpu": 64, "cuda": 512}
MAX_PREFILL_TOKENS = {"cpu": 4096, "cuda": 8192}
"""Where `rollout.max_sequences` and `rollout.max_prefill_tokens` say nothing."""
SORTED_ROWS = 64
"""Rows of logits that are sorted at a time, for top-k, top-p and min-p."""
KEYS_PER_TOKEN = 16
"""Keys that attention gathers at once, for each token that a micro-batch or a prefill may have: sequences with a long
prefix and few tokens of their own would otherwise gather it without limit."""


class NamedChoice(Section):
    """One of several things, by its name alone or with options: `vllm`, or `{name: vllm, memory_fraction: 0.5}`."""

    @model_validator(mode="before")
    @classmethod
    def from_name(cls, written: Any) -> Any:
        return {"name": written} if isinstance(written, str) else written


class EngineChoice(NamedChoice):
    """The engine that generates, by its name alone or with options; see [engines](engines.md)."""

    name: Literal["native", "vllm", "sglang"] = "native"
    """`native` is Corral's own, in the trainers' process and with their tensors where it can. `vllm` and `sglang` have
    to be installed, and run in processes of their own."""
    own_process: bool | None = None
    """Whether the native engine has a process and a copy of the weights of its own, as others always have."""
    python: str | None = None
    """Python interpreter that runs the engine's process, of an environment that has the engine. None: the one that runs
    Corral."""
    tensor_parallel: PositiveInt = 1
    """Devices of a node over which vLLM spreads one model. The rollout's devices form engines of so many in order."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Part of the device's memory that vLLM or SGLang take for weights and KV cache. None: their own default, or 0.4
    where trainers are on the same device."""
    arguments: dict[str, Any] = {}
    """More arguments of vLLM's engine or SGLang's server, by their names there; the installed version has to have
    them."""

    @property
    def in_process(self) -> bool:
        return self.name == "native" and not self.own_process


class Rollout(Section):
    """How answers are sampled."""

    engine: EngineChoice = EngineChoice()
    """The engine that generates: `native`, `vllm`, `sglang`, or one of them with options."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it, in sampling and in training alike."""
    top_p: Fraction = 1.0
    """Sample from the likeliest tokens that have this probability together. 1: all tokens."""
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K)] = 0
    """Sample from the so many likeliest tokens. 0: all tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Leave out tokens whose probability is below this fraction of the likeliest one's. 0: all tokens."""
    max_response_tokens: PositiveInt = 256
    """Most tokens of a trajectory behind its prompt, those that the environment says between the turns included."""
    max_turn_tokens: PositiveInt | None = None
    """Most tokens generated in one turn. None: as many as are left."""
    max_observation_tokens: PositiveInt | None = None
    """Most tokens of what the environment says between two turns; the rest is cut, but for its closing tag. None: no
    limit."""
    max_turns: PositiveInt = 1
    """Most replies of the model in one trajectory."""
    stop: list[str] = []
    """Strings that end a turn when generated."""
    stop_token_ids: list[NaturalInt] = []
    """Tokens that end a turn, besides the model's own end-of-turn tokens."""
    max_sequences: PositiveInt | None = None
    """Sequences decoded at the same time; bounds the KV cache. None: 64 on a CPU, 512 on a GPU."""
    max_prefill_tokens: PositiveInt | None = None
    """Prompt tokens computed in one forward pass, between which other sequences go on. None: 4096 on a CPU, 8192 on a
    GPU."""


class BatchSizes(Section):
    """How much is sampled and trained on in a step."""

    prompts_per_step: PositiveInt = 8
    """Number of prompts in each step."""
    samples_per_prompt: PositiveInt = 8
    """Answers sampled to each prompt: its group."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps per pass over a batch."""
    ppo_epochs: PositiveInt = 1
    """Passes over a batch (PPO's epochs)."""
    max_tokens_per_micro_batch: PositiveInt = 4096
    """Most tokens in one forward and backward pass; tokens with the same prefix count once, as long as all trajectories
    have 16 times as many at most. A trajectory with more is trained in parts: as gradient checkpointing does it, and
    feed-forward networks so many tokens at a time."""


class PartChoice(NamedChoice):
    """A declared part of the algorithm, and options of it: `sapo`, or `{name: sapo, tau_positive: 2}`.

    Which names and options there are is not known here but to `corral/algorithms`, and to the user's own files.
    """

    model_config = ConfigDict(extra="allow")

    name: str | None = None


class KL(Section):
    """The divergence from the reference model that is penalized."""

    where: KLPlace | None = None
    """Whether the KL is a term of the loss or subtracted from the rewards. Not written: as the algorithm's preset has
    it. null: there is no KL."""
    estimator: PartChoice = PartChoice()
    """How the KL of a token is estimated; see [algorithms](algorithms.md#kl). Not written: k3 in the loss, k1 in the
    reward."""
    coefficient: PositiveFloat | None = None
    """Weight of the KL; with an adaptive controller, the first one. Not written: 0.001."""
    controller: PartChoice = PartChoice()
    """Whether the coefficient stays (fixed), or follows the KL towards a target (adaptive). Not written: fixed."""


class DynamicSampling(Section):
    """Drop groups whose rewards are all equal, and sample other prompts instead (DAPO)."""

    enabled: bool | None = None
    """Whether groups are dropped. Not written: as the algorithm's preset has it."""
    max_rounds: PositiveInt | None = None
    """Rounds of refilling in one step before it goes on with the groups it has. Not written: 10."""


class Algorithm(Section):
    """How rewards become updates."""

    name: AlgorithmName = "grpo"
    """A preset: it decides advantage, loss, KL, aggregation and their options where they are not given here."""
    advantage: PartChoice = PartChoice()
    """How much better than expected a token was. One of the [advantages](algorithms.md#advantages), or a function of
    yours, `file.py:function` or `module:function`. Not written: the preset's."""
    loss: PartChoice = PartChoice()
    """What is minimized, token by token. One of the [losses](algorithms.md#losses), or a function of yours,
    `file.py:function` or `module:function`. Not written: the preset's."""
    aggregation: PartChoice = PartChoice()
    """How the losses of tokens become one number. Not written: the preset's."""
    max_mean_ratio: Annotated[float, Field(gt=1)] | None = None
    """An update is not made if the mean over its tokens of the ratio of new to old probability is above this."""
    reward_clip: PositiveFloat | None = None
    """A trajectory's reward counts as at most this, and at least its negative. What is reported is the whole."""
    whiten: bool = False
    """Bring the advantages of a step to mean 0 and deviation 1 once they are computed, as gae and the
    reinforce_plus_plus ones are anyway."""
    whiten_by: Literal["batch", "rewards"] = "batch"
    """What is whitened together. rewards: samples whose rows have the same `environment.rewards`, each domain by
    itself, as in ROLL; so a hard domain is not pushed down as a whole."""
    advantage_clip: PositiveFloat | None = None
    """A token's advantage is at most this, and at least its negative; after whitening, where there is any."""
    lone_sample: Literal["zero", "raw"] = "zero"
    """Advantage of a sample that has no other of its prompt to be compared with, where the advantage compares them.
    zero: it is not trained on. raw: its reward, as in verl."""
    mask_truncated: bool = False
    """Leave samples that `rollout.max_response_tokens` cut off out of the loss, and out of the counts that it is
    divided by (DAPO's overlong filtering). Their rewards stay in the statistics of their groups and of the batch."""
    mask_mean_reward: tuple[float, float] | None = None
    """Leave all samples of a prompt out of the loss in the same way, unless the mean of their rewards is above the
    first number and below the second: prompts that are too hard or too easy (`difficulty_mask` in ROLL)."""
    entropy_coefficient: NaturalFloat = 0.0
    """Weight of an entropy bonus."""
    llds_coefficient: NaturalFloat = 0.0
    """Weight of a penalty on good samples that become less likely (lazy likelihood displacement)."""
    old_logprobs: Literal["engine", "recompute"] | None = None
    """The log-probs that ratios are taken against. engine: those the tokens were sampled with (one pass less).
    recompute: the trainer's, before the first update. Not written: engine where both compute the same, recompute with
    `schedule.max_staleness` above 0 or `train.parallel.tensor`, `context` or `expert` above 1."""
    kl: KL = KL()
    correction: PartChoice = PartChoice()
    """How tokens are weighted that were sampled by another policy than the one that is trained (other engine, older
    weights). Not written: none where `old_logprobs` are the engine's by default, else token_tis."""
    dynamic_sampling: DynamicSampling = DynamicSampling()
    shaping: PartChoice = PartChoice()
    """What is added to rewards before they become advantages. Not written: none."""


class Optimizer(Section):
    """AdamW for the model."""

    learning_rate: PositiveFloat = 1e-6
    """Learning rate after warm-up."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    epsilon: PositiveFloat = 1e-8
    """AdamW's term in the denominator."""
    weight_decay: NaturalFloat = 0.0
    """AdamW's weight decay, of all parameters that are trained: of norms and biases, too."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which AdamW's two moments are kept; bfloat16, rounded stochastically, takes half the memory. They are
    computed in float32, and master weights are float32, either way."""
    max_gradient_norm: PositiveFloat = 1.0
    """A gradient with a larger norm is scaled down to this."""
    warmup_steps: NaturalInt = 0
    """Updates in which the learning rate rises linearly; the first one has 1/`warmup_steps` of it, not 0."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Fraction of all updates that are warm-up, instead of `warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after warm-up, until the last update of the run. Updates that are empty, or that
    `algorithm.max_mean_ratio` drops, do not count: after any, it ends above its minimum."""
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where linear and cosine end, as a fraction of the learning rate."""


class CriticOptimizer(Optimizer):
    """AdamW for the critic."""

    learning_rate: PositiveFloat = 1e-5


class Critic(Section):
    """The value model, where the advantage needs one (gae)."""

    path: str | None = None
    """The model that the critic starts from. None: a copy of the model, with a new value head."""
    optimizer: CriticOptimizer = CriticOptimizer()
    value_clip: PositiveFloat | None = 0.5
    """How far a value may move from the one it had before the first update. null: any distance."""
    warmup_steps: NaturalInt = 0
    """Steps in which only the critic is trained."""


class TeacherEndpoint(Section):
    """A server that gives log-probs of a prompt's tokens as vLLM and `corral serve` do (`prompt_logprobs`)."""

    url: Annotated[str, Field(pattern=r"^https?://[^/\s]+")]
    """Address of its API: `http://10.0.0.7:8000/v1`."""
    model: str
    """Name of the model there."""
    api_key_variable: str | None = None
    """Environment variable with the key of the API."""
    concurrency: PositiveInt = 64
    """Requests at once."""
    timeout_s: PositiveFloat = 120.0
    """Seconds for one attempt."""
    retries: NaturalInt = 3
    """Further attempts after an error of the connection or the server. When they fail too, the run ends."""


class Reference(Section):
    """The frozen model that a KL or the losses dpo and ipo are relative to, or the teacher of distillation. There is
    none without any of these."""

    path: str | None = None
    """The reference model. None: the model as it was before training. A teacher may have another size, but must have
    the same tokens."""
    endpoint: TeacherEndpoint | None = None
    """The teacher, where a server computes it instead of `path`."""


class RewardModel(Section):
    """The frozen classifier whose score is the reward named `reward_model`. There is none without such a reward. Each
    device of the role scores its part of a step's conversations."""

    path: str | None = None
    """A folder in Hugging Face layout or a hub name of a sequence classifier with one label, with its own tokenizer and
    chat template."""
    dtype: DtypeName = "auto"
    """Type of weights and computation. auto: as for `model.dtype`."""
    shard: PositiveInt = 1
    """Devices that hold one classifier together: each has a part of every layer's weights, which are gathered when the
    layer computes. Above 1 the role needs devices of its own."""
    max_length: PositiveInt | None = None
    """Most tokens of a conversation. A longer one is not cut: its sample gets `on_error` of the reward, and is counted.
    None: as many as the classifier was made for."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. It can do anything your account can."""


class Parallel(Section):
    """How a model is spread over the devices of its role: their number is pipeline x replicate x shard x expert x
    context x tensor."""

    pipeline: PositiveInt = 1
    """Pipeline stages: devices over which a model's layers are dealt, in order. Micro-batches go through the stages one
    behind the other, forward and backward in turn (1F1B), so an update should have several times as many."""

    replicate: PositiveInt = 1
    """Copies of the sharded model (HSDP). Where neither this nor `shard` is written, and the run is on GPUs or
    `cluster.device_memory` is written: as many as there is memory for, each on the devices of one node where they hold
    one."""
    shard: PositiveInt | None = None
    """Devices over which one copy's parameters, gradients and optimizer are sharded (FSDP). None: all that are left.
    1: nothing is sharded, and an engine on the same device decodes with the trainer's own tensors."""
    expert: PositiveInt = 1
    """Devices over which a mixture's experts are spread; data and the other parameters are spread over them as well."""
    context: PositiveInt = 1
    """Devices over which the tokens of a micro-batch are spread."""
    tensor: PositiveInt = 1
    """Devices over which each layer's matrices are cut."""


LOGITS_CHUNK = {"cpu": 256, "cuda": 8192}
"""Where `train.logits_chunk` says nothing."""
OPTIMIZER_SLOT_SIZE, OPTIMIZER_SLOTS = 2**26, 3
"""Numbers of one state that a slot on the device holds while offloaded states are updated, and how many slots there
are: one that computes, the next one on its way there and the last one on its way back."""


GradientCheckpointing = bool | Literal["selective"]


class Train(Section):
    """How gradients are computed."""

    parallel: Parallel = Parallel()
    offload: list[Literal["parameters", "gradients", "optimizer", "activations"]] = []
    """What lives in the host's memory while the device does not compute with it. Activations: the layers' inputs that
    gradient checkpointing keeps."""
    gradient_checkpointing: GradientCheckpointing = False
    """Compute activations again in the backward pass (less memory, a third more work). selective: all but matrix
    products and attention, whose results are kept (somewhat less memory, next to no more work)."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over devices. bfloat16: half the bytes over the links, and less exact; each
    device sums its own micro-batches in float32."""
    logits_chunk: PositiveInt | None = None
    """Tokens whose logits exist at the same time. None: 256 on a CPU, 8192 on a GPU."""
    threads: PositiveInt | None = None
    """CPU threads of the trainer. None: all cores, on a cluster the node's, in equal parts for its workers."""
    router_aux_loss_coef: NaturalFloat = 0.0
    """Coefficient of a mixture's load-balancing loss, as in transformers' models, of each micro-batch. It is added to
    the policy loss of each token. 0: none, whatever the model's configuration says."""


class Schedule(Section):
    """How long to train, and how rollouts and training overlap."""

    steps: PositiveInt | None = None
    """Steps to train; either this or `epochs`."""
    epochs: PositiveFloat | None = None
    """Passes over the data; either this or `steps`."""
    max_staleness: NaturalInt = 0
    """Weight versions by which rollouts may lag behind training. 0: on-policy. Above: `rollout` has its own devices."""
    pipelined: bool = False
    """Train on the samples that are finished while others of the step are still generated. Still on-policy."""


class Validation(Section):
    """When and how the score on held-out prompts is measured."""

    before_training: bool = True
    """Validate before the first step."""
    after_training: bool = True
    """Validate after the last step."""
    every: NaturalInt = 0
    """Steps between validations. 0: none in between."""
    samples_per_prompt: PositiveInt = 1
    """Answers sampled to each prompt: k of mean@k and pass@k."""
    temperature: NaturalFloat = 0.0
    """Sampling temperature of validation. 0: greedy."""
    top_p: Fraction = 1.0
    """Sample from the likeliest tokens that have this probability together. 1: all tokens."""
    max_prompts: PositiveInt | None = None
    """Use only the first so many rows. None: all."""
    pass_threshold: float = 1.0
    """A reward of at least this counts as solved in pass@k."""


class Checkpoint(Section):
    """What is saved, and from where a run goes on."""

    every: NaturalInt = 0
    """Steps between checkpoints. 0: by time, at the end, and on Ctrl-C."""
    minutes: NaturalFloat = 30.0
    """A checkpoint is also saved at the end of a step if the last one is so many minutes old: a run that loses a
    trainer goes on from there. 0: not by time."""
    keep: PositiveInt | Literal["all"] = 2
    """Number of newest checkpoints that are kept, or `all`."""
    keep_weights: bool = False
    """A checkpoint that is no longer kept leaves its model behind, without optimizer states: `weights/step_000040` in
    the run's folder, in Hugging Face layout."""
    upload: list[str] = []
    """A command and its arguments that is run after each checkpoint, while training goes on; `{checkpoint}` stands for
    the checkpoint's folder, `{step}` for its step. The next checkpoint waits until it has ended. If it fails, that is a
    warning."""
    best: str | None = None
    """A metric of the validation, such as `validation/mean@1`: a checkpoint is also saved when it is higher than after
    any step before, or lower where it is a `loss` or a `perplexity`, and the best one is kept besides the newest."""
    at_end: bool = True
    """Save a checkpoint after the last step."""
    resume: str = "auto"
    """auto: go on where this run stopped. never: start anew, in a folder of its own. Or the path of a checkpoint, or of
    a run, whose newest one it is."""


class Prometheus(Section):
    """The run's last metrics over HTTP, for Prometheus, at /metrics of the controller."""

    host: str = "127.0.0.1"
    """Address to listen on; if it is not loopback, `token_file` is needed."""
    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port to listen on; 0: any that is free, which is in logs/main.log."""
    token_file: str | None = None
    """File with the bearer token that each request needs. None: no token."""


class Logging(Section):
    """What is recorded."""

    runs: str = "runs"
    """Folder in which the run's folder is made."""
    trackers: list[Literal["console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]] = ["console"]
    """Where metrics go; metrics.jsonl is always written."""
    project: str = "corral"
    """The project's name in trackers that have projects."""
    names: Literal["corral", "verl"] = "corral"
    """Names of the metrics in trackers; verl: its own for those that it has, too. metrics.jsonl, console and Prometheus
    have Corral's."""
    samples: NaturalInt = 2
    """Answers printed after the first validation and the last, of the same prompts."""
    tracked_samples: NaturalInt = 8
    """Trajectories of each step that the trackers get: as tables, in mlflow as files, in swanlab as texts."""
    prometheus: Prometheus | None = None
    """Serve the last metrics to Prometheus. None: do not."""
    trajectories: bool = True
    """Write every trajectory to the run folder."""
    keep_trajectories: PositiveInt | Literal["all"] = "all"
    """Number of last steps whose trajectories stay in the run folder."""
    curve: bool = True
    """Draw the learning curve, curve.png, when the run ends; drawing takes half a second."""

    @property
    def folder(self) -> Path:
        """`runs`, with `~` as the home directory."""
        return Path(self.runs).expanduser()


class Service(Section):
    """A program that runs beside the workers on every node, such as a retriever, and is started again if it dies."""

    retriever: str | None = None
    """An index made by `corral retriever build`, to be served as `corral retriever serve` does."""
    corpus: str | None = None
    """The corpus of that index, for a plan that says how large the index will be and how long it takes to build."""
    command: list[str] = []
    """Any other program to run, argument by argument."""
    devices: NaturalInt = 0
    """Number of devices of every node that the program has for itself: they are the node's last ones, no role is placed
    on them (`all` leaves them out), and CUDA_VISIBLE_DEVICES has them for the program. 0: none."""
    port: PositiveInt
    """Port on which the program listens, on loopback."""
    health: str = "/health"
    """Path that answers 200 when the program is ready."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds in which the program has to become ready."""


HERE = "here"
"""A `cluster.address`."""


class Cluster(Section):
    """With this section a recipe runs on a Ray cluster, without it in one process."""

    runtime: Literal["auto", "local", "ray"] = "auto"
    """auto: ray where the recipe has a `cluster` section. local: in this process, on one device."""
    address: str = "auto"
    """Address of the Ray cluster, `10.0.0.1:6379`. auto: the one that runs on this machine, else one is started for the
    run. here: all nodes are started on this machine for the run, whatever devices it has; see
    [rehearsals](clusters.md#rehearsals)."""
    nodes: PositiveInt = 1
    """Number of machines."""
    devices_per_node: PositiveInt = 1
    """GPUs of each node; on nodes without, worker slots."""
    device_memory: PositiveFloat | None = None
    """Memory of a device in GiB. With it a plan that does not fit is an error, on whatever machine it is made; without
    it, one that no GPU holds."""
    placement: dict[str, str | int | list[int]] = {"actor,rollout,reference,critic,reward_model": "all"}
    """Roles to devices: `all`, `0-19` (inclusive), `0,2,5`, `[0, 1]`, `list(range(0, 4))`."""
    transfer: Literal["auto", "shared", "collective", "object", "ipc"] = "auto"
    """How new weights reach the rollout. shared: within a process. collective: broadcast (NCCL, gloo). object: through
    Ray's object store. ipc: through memory of the node that both processes map, not between GPUs. auto: shared where
    actor and rollout have the same devices, else collective."""
    environment: list[str] = []
    """Names of environment variables, such as HF_TOKEN, that workers get with the values they have where `corral train`
    or `corral submit` is started. Where they are not set there, workers keep their node's own."""
    services: dict[str, Service] = {}
    """Programs that run on every node as long as the run does, by a name of your choice."""
    min_nodes: PositiveInt | None = None
    """When nodes are lost the run goes on with the rest, down to so many. None: all are needed."""
    max_restarts: NaturalInt = 3
    """Times in a row, without a new checkpoint, that workers which died are started again."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds in which devices have to become free and workers to start."""
    call_timeout_s: PositiveFloat = 3600.0
    """Seconds that any one call of a worker may take."""
    node_timeout_s: PositiveFloat = 20.0
    """A node that does not answer for so many seconds is lost."""
    worker_timeout_s: PositiveFloat = 300.0
    """A worker, or an engine's own process, that shows no sign of life for so many seconds is killed and replaced as
    one that died. To compute is a sign of life, however long it takes."""

    @property
    def is_here(self) -> bool:
        """Whether this machine stands for all nodes."""
        return self.address == HERE

    @property
    def num_service_devices(self) -> int:
        """Devices of each node that services claim."""
        return sum(service.devices for service in self.services.values())


class Recipe(Section):
    name: str
    """Name of the run, and of its folder."""
    seed: NaturalInt = 0
    """Seed of the order of rows, of every sample, and of everything else that is random."""
    model: Model
    data: Data
    environment: Environment = Environment()
    environments: dict[str, TaggedEnvironment] = {}
    """Several environments, by a tag of your choice, instead of `environment`. Metrics have the tag in their names."""
    rollout: Rollout = Rollout()
    batch: BatchSizes = BatchSizes()
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    critic: Critic = Critic()
    reference: Reference = Reference()
    reward_model: RewardModel = RewardModel()
    train: Train = Train()
    schedule: Schedule = Schedule()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    cluster: Cluster = Cluster()

    @property
    def trains_on_rows(self) -> bool:
        """Whether the answers of the rows are trained on (supervised fine-tuning, preferences), and nothing is rolled
        out for it."""
        return PRESETS[self.algorithm.name].trains_on_rows

    @property
    def trains_on_pairs(self) -> bool:
        """Whether each row has two answers to train on, of which one was preferred."""
        return PRESETS[self.algorithm.name].trains_on_pairs

    @property
    def validates_by_generation(self) -> bool:
        """Whether validation rolls out prompts. Where rows are trained on, it does if there is a reward to score
        with."""
        has_environment = bool({"environment", "environments"} & self.model_fields_set)
        return self.data.validation is not None and (has_environment or not self.trains_on_rows)

    @property
    def needs_engine(self) -> bool:
        return self.validates_by_generation or not self.trains_on_rows

    @property
    def needs_reward_model(self) -> bool:
        """Whether a reward of what is rolled out is the reward model's score."""
        rewards = [
            one for environment in self.tagged_environments.values() for one in environment.named_rewards.values()
        ]
        return self.needs_engine and any(reward.is_model for reward in rewards)

    @property
    def num_trajectories(self) -> int:
        """Trajectories that a step trains on."""
        of_row = 2 if self.trains_on_pairs else 1
        return self.batch.prompts_per_step * (of_row if self.trains_on_rows else self.batch.samples_per_prompt)

    @property
    def num_units(self) -> int:
        """What a step's updates are made of: its trajectories, or its pairs."""
        return self.batch.prompts_per_step if self.trains_on_pairs else self.num_trajectories

    @property
    def max_trained_tokens(self) -> int:
        """Most tokens of a trajectory that is trained on."""
        response = 0 if self.trains_on_rows else self.rollout.max_response_tokens
        return self.data.max_prompt_tokens + response

    @property
    def tagged_environments(self) -> "dict[str, Environment]":
        """By tag; the only one has none."""
        return dict(self.environments) or {"": self.environment}

    def mixing_weights(self, part: Part) -> dict[str, float]:
        """Of boards, by tag."""
        weights = {tag: environment.weight for tag, environment in self.environments.items()}
        if part == "validation":
            own = {tag: environment.validation_weight for tag, environment in self.environments.items()}
            weights |= {tag: weight for tag, weight in own.items() if weight is not None}
        return weights or {"": 1.0}

    @property
    def code_names(self) -> dict[tuple[str, ...], str]:
        """Names, by their keys, that may be `module:name` or `file.py:name` of the user's: what runs in the workers."""
        names: dict[tuple[str, ...], str | None] = {
            ("algorithm", "advantage", "name"): self.algorithm.advantage.name,
            ("algorithm", "loss", "name"): self.algorithm.loss.name,
        }
        for tag, environment in self.tagged_environments.items():
            where = ("environments", tag) if tag else ("environment",)
            names |= {(*where, "name"): environment.name}
            for name, reward in environment.named_rewards.items():
                names[(*where, *(("rewards", name) if name else ("reward",)), "name")] = reward.name
        return {key: name for key, name in names.items() if name is not None and ":" in name}
