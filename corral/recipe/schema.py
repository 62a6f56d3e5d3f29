"""The recipe: every key a user may write, with its type, default and meaning.

Strict: a key that is not here is an error. This module only describes; reading YAML and overrides is
`load.py`, checks across keys are `rules.py`, and what follows from a recipe is `plan.py`.
A field left at None means "decided elsewhere": by the algorithm's preset, by the model, or not used at all.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NaturalInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NaturalFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
AdvantageName = Literal[
    "gae",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "grpo_passk",
    "turn_grpo",
    "gigpo",
]
LossName = Literal["ppo", "gspo", "cispo", "sapo", "gmpo", "gpg", "dro", "dppo_tv", "dppo_kl"]
AlgorithmName = Literal[
    "grpo",
    "ppo",
    "dr_grpo",
    "dapo",
    "gspo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "grpo_passk",
    "turn_grpo",
    "gigpo",
    "cispo",
    "sapo",
    "gmpo",
    "dro",
    "dppo_tv",
    "dppo_kl",
]
AggregationName = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
]
Part = Literal["train", "validation"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]


class Section(BaseModel):
    """A part of the recipe: no unknown keys, nothing changed after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Model(Section):
    path: str
    """A folder in Hugging Face layout, a hub name, or a built-in one: `smollm2-135m-instruct`, or `blank-1m`, which
    reads bytes and has learnt nothing yet."""
    dtype: DtypeName = "auto"
    """Of weights and computation; the optimizer keeps float32 copies of smaller ones, and float16 scales the loss.
    auto: bfloat16 where the device is fast at it, else float32."""
    exact: bool = False
    """Attention in float64, so that the engine's log-probs are the trainer's to the last bit. float32 only, and only
    where the matrix library sums in a fixed order, as OpenBLAS does. Attention costs twice as much."""
    chat_template: str | None = None
    """A Jinja template, or the path of a file with one, instead of the tokenizer's own."""
    trust_remote_code: bool = False


class Source(Section):
    """Rows: files (parquet, jsonl; globs allowed), a data set on a hub, a generated task, or a Python function."""

    path: str | list[str]
    """`rows.parquet`, `data/*.jsonl`, `hf:openai/gsm8k`, `reasoning_gym:chain_sum`, `arithmetic:addition`,
    `module:function`, or `boards`: numbers from which a game's environment makes its boards."""
    split: str | None = None
    """Of a hub data set."""
    subset: str | None = None
    """Of a hub data set (its configuration name)."""
    options: dict[str, Any] = {}
    """Arguments of a generated task or of the function."""
    size: PositiveInt | None = None
    """Rows to generate (generated tasks and boards only)."""
    seed: NaturalInt = 0
    """Of a generated task, or of boards: other seeds give other boards."""
    max_rows: PositiveInt | None = None
    """Use at most so many rows of the source, from its beginning."""


class Data(Section):
    train: Source
    validation: Source | None = None
    prompt_key: str = "prompt"
    """Column with the question: text, or a list of chat messages."""
    answer_key: str | None = None
    """Column with the reference answer. None: `answer`, else verl's `reward_model.ground_truth`."""
    system: str | None = None
    """System message put before every prompt."""
    template: str | None = None
    """Text with `{prompt}` in it, put around the last user message."""
    chat: bool = True
    """Render with the chat template. False: the prompt's text is tokenised as it is."""
    max_prompt_tokens: PositiveInt = 1024
    overlong: Literal["error", "filter", "truncate_left", "truncate_right"] = "error"
    """What happens to a prompt with more tokens than that. Counted and reported, whichever."""
    shuffle: bool = True


class Reward(Section):
    name: str = "exact"
    """exact, regex, number, gsm8k, math, reasoning_gym, em, sub_em, f1, search_r1, by_source (one of them, by the row's
    `data_source`), or `module:function` / `file.py:function`."""
    options: dict[str, Any] = {}
    """Keyword arguments for the function."""
    timeout_s: PositiveFloat = 10.0
    """A call that takes longer is killed and the sample gets `on_error`."""
    workers: PositiveInt = 2
    """Processes that run the function."""
    on_error: float = 0.0
    """Reward of a sample whose reward function raised or hung."""


class Environment(Section):
    name: str = "question"
    """question, frozen_lake, sokoban, search, tools, agent, gymnasium, reasoning_gym, or `module:Class`."""
    options: dict[str, Any] = {}
    """Arguments of its class."""
    reward: Reward = Reward()
    timeout_s: PositiveFloat = 60.0
    """For one reset or step."""
    concurrency: PositiveInt | None = None
    """Trajectories that are played at the same time on a worker. None: all of them."""
    processes: PositiveInt = 8
    """For an environment whose methods block: so many are played at a time, each in a process of its own."""


class TaggedEnvironment(Environment):
    weight: NaturalFloat = 1.0
    """Mixing weight of its boards, relative to those of the others (`path: boards`; rows of other
    sources name their environment in a column `environment`). 0: none."""
    validation_weight: NaturalFloat | None = None
    """Of the boards to validate on. None: as `weight`."""


MAX_SEQUENCES = {"cpu": 64, "cuda": 512}
MAX_PREFILL_TOKENS = {"cpu": 4096, "cuda": 8192}
"""Where `rollout.max_sequences` and `rollout.max_prefill_tokens` say nothing."""


class Rollout(Section):
    engine: Literal["native"] = "native"
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    top_k: NaturalInt = 0
    """0: all tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_response_tokens: PositiveInt = 256
    """Of a trajectory: everything behind the prompt, what the environment says between the turns included."""
    max_turn_tokens: PositiveInt | None = None
    """Generated in one turn. None: as many as are left."""
    max_observation_tokens: PositiveInt | None = None
    """Of what the environment says between two turns; the rest is cut, but for its closing tag. None: as it is."""
    max_turns: PositiveInt = 1
    stop: list[str] = []
    """Strings that end a turn when generated."""
    stop_token_ids: list[NaturalInt] = []
    """Besides the model's own end-of-turn tokens."""
    max_sequences: PositiveInt | None = None
    """Sequences decoded at the same time; bounds the KV cache. None: 64 on a CPU, 512 on a GPU."""
    max_prefill_tokens: PositiveInt | None = None
    """Prompt tokens computed in one pass, between which others go on. None: 4096 on a CPU, 8192 on a GPU."""


class Batch(Section):
    prompts_per_step: PositiveInt = 8
    samples_per_prompt: PositiveInt = 8
    updates_per_step: PositiveInt = 1
    """Optimizer steps per pass over a batch."""
    ppo_epochs: PositiveInt = 1
    """Passes over a batch (PPO's epochs)."""
    max_tokens_per_micro_batch: PositiveInt = 4096
    """Hard cap; tokens with the same history count once."""


class KL(Section):
    where: Literal["loss", "reward"] | None = None
    """Not written: as the algorithm's preset has it. null: no KL."""
    estimator: KLEstimator | None = None
    coefficient: PositiveFloat | None = None
    controller: Literal["fixed", "adaptive"] | None = None
    target: PositiveFloat | None = None
    """Adaptive controller only."""
    horizon: PositiveInt | None = None
    """Adaptive controller only."""


class Correction(Section):
    """For tokens played by another policy than the one that is trained (other engine, older weights)."""

    name: Literal["none", "token_tis", "sequence_tis", "icepop", "rejection"] | None = None
    """Not written: none on-policy, token_tis with `schedule.max_staleness` above 0."""
    cap: PositiveFloat | None = None
    """Upper bound of the weight (TIS), of the band (IcePop), or of the accepted ratio (rejection)."""
    floor: PositiveFloat | None = None
    """Lower bound of the band (IcePop, rejection)."""
    level: Literal["token", "sequence"] | None = None
    """Of rejection."""


class DynamicSampling(Section):
    """Drop groups whose rewards are all equal, and play other prompts instead (DAPO)."""

    enabled: bool | None = None
    max_rounds: PositiveInt | None = None
    """Rounds of refilling in one step before it goes on with what it has."""


class Overlong(Section):
    """Soft penalty for responses that come close to the limit (DAPO)."""

    buffer_tokens: PositiveInt | None = None
    penalty: PositiveFloat | None = None


class Algorithm(Section):
    name: AlgorithmName = "grpo"
    """A preset: it decides advantage, loss, KL, clipping and aggregation where they are not given here."""
    advantage: AdvantageName | None = None
    loss: LossName | None = None
    aggregation: AggregationName | None = None
    aggregation_norm: PositiveFloat | None = None
    """The constant of seq_mean_token_sum_norm. None: rollout.max_response_tokens."""
    clip_low: NaturalFloat | None = None
    clip_high: NaturalFloat | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    max_mean_ratio: Annotated[float, Field(gt=1)] | None = None
    """An update is not made if the mean over its tokens of the ratio of new to old probability is above this."""
    reward_clip: PositiveFloat | None = None
    """A trajectory's reward counts as at most this, and at least its negative. What is reported is the whole."""
    whiten: bool = False
    """Bring the advantages of a step to mean 0 and deviation 1 once they are computed, as gae and the
    reinforce_plus_plus ones are anyway."""
    advantage_clip: PositiveFloat | None = None
    """A token's advantage is at most this, and at least its negative; after whitening, where there is any."""
    gamma: Fraction | None = None
    gae_lambda: Fraction | None = None
    """GAE's lambda."""
    turn_gamma: Fraction | None = None
    """Discount of a reward for every turn that it comes later (turn_grpo, gigpo)."""
    turn_weight: PositiveFloat | None = None
    """Of the comparison of single turns, beside that of whole trajectories (gigpo)."""
    sapo_tau_positive: PositiveFloat | None = None
    sapo_tau_negative: PositiveFloat | None = None
    dro_beta: PositiveFloat | None = None
    dppo_threshold: PositiveFloat | None = None
    entropy_coefficient: NaturalFloat = 0.0
    llds_coefficient: NaturalFloat = 0.0
    """Lazy likelihood displacement regularizer: penalises a falling likelihood of good samples."""
    old_logprobs: Literal["engine", "recompute"] | None = None
    """engine: those the samples were drawn with (one pass less). recompute: by the trainer, before the first update.
    Not written: engine on-policy, recompute with `schedule.max_staleness` above 0."""
    kl: KL = KL()
    correction: Correction = Correction()
    dynamic_sampling: DynamicSampling = DynamicSampling()
    overlong: Overlong = Overlong()


class Optimizer(Section):
    learning_rate: PositiveFloat = 1e-6
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    epsilon: PositiveFloat = 1e-8
    weight_decay: NaturalFloat = 0.0
    max_gradient_norm: PositiveFloat = 1.0
    warmup_steps: NaturalInt = 0
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """The share of all updates that are warm-up, instead of `warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_learning_rate_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0


class CriticOptimizer(Optimizer):
    learning_rate: PositiveFloat = 1e-5


class Critic(Section):
    path: str | None = None
    """None: starts as a copy of the model, with a new value head."""
    optimizer: CriticOptimizer = CriticOptimizer()
    value_clip: PositiveFloat | None = 0.5
    warmup_steps: NaturalInt = 0
    """Steps in which only the critic learns."""


class Reference(Section):
    path: str | None = None
    """None: the model as it was before training."""


class Parallel(Section):
    """How a model is spread over the devices of its role: their number is replicate x shard x expert x context x
    tensor."""

    replicate: PositiveInt = 1
    """Copies of the sharded model (HSDP)."""
    shard: PositiveInt | None = None
    """Devices over which one copy's parameters, gradients and optimizer are sharded (FSDP). None: all that are left.
    1: nothing is sharded, and an engine on the same device decodes with the trainer's own tensors."""
    expert: PositiveInt = 1
    """Devices over which a mixture's experts are dealt; besides, they share the data and the other parameters."""
    context: PositiveInt = 1
    """Devices over which the tokens of a micro-batch are dealt."""
    tensor: PositiveInt = 1
    """Devices over which each layer's matrices are cut."""


LOGITS_CHUNK = {"cpu": 256, "cuda": 8192}
"""Where `train.logits_chunk` says nothing."""


class Train(Section):
    parallel: Parallel = Parallel()
    offload: list[Literal["parameters", "gradients", "optimizer"]] = []
    """What lives in the host's memory while the device does not compute with it."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass (less memory, a third more work)."""
    logits_chunk: PositiveInt | None = None
    """Tokens whose logits exist at the same time. None: 256 on a CPU, 8192 on a GPU."""
    threads: PositiveInt | None = None
    """CPU threads. None: all cores."""


class Schedule(Section):
    steps: PositiveInt | None = None
    epochs: PositiveFloat | None = None
    """Passes over the data; either this or steps."""
    max_staleness: NaturalInt = 0
    """Weight versions that playing may run ahead of training. 0: on-policy. Above: `rollout` has its own devices."""
    pipelined: bool = False
    """Score and learn from what has been played while the rest of the step is still being played. Still on-policy."""


class Validation(Section):
    before_training: bool = True
    after_training: bool = True
    every: NaturalInt = 0
    """Steps between validations. 0: none in between."""
    samples_per_prompt: PositiveInt = 1
    """k of mean@k and pass@k."""
    temperature: NaturalFloat = 0.0
    """0: greedy."""
    top_p: Fraction = 1.0
    max_prompts: PositiveInt | None = None
    pass_threshold: float = 1.0
    """A reward of at least this counts as solved in pass@k."""


class Checkpoint(Section):
    every: NaturalInt = 0
    """Steps between checkpoints. 0: only at the end and on Ctrl-C."""
    keep: PositiveInt = 2
    at_end: bool = True
    resume: str = "auto"
    """auto: go on where this run stopped. never: start anew, in a folder of its own. Or a checkpoint's path."""


class Logging(Section):
    runs: str = "runs"
    """Folder in which the run's folder is made."""
    trackers: list[Literal["console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]] = ["console"]
    """metrics.jsonl is always written."""
    project: str = "corral"
    samples: NaturalInt = 2
    """Answers printed after each validation."""
    trajectories: bool = True
    """Write every trajectory to the run folder."""


class Service(Section):
    """A program that runs beside the workers on every node, such as a retriever, and is started again if it dies."""

    retriever: str | None = None
    """An index made by `corral retriever build`, to be served as `corral retriever serve` does."""
    corpus: str | None = None
    """Of which that index is to be made, for a plan that says how large it will be and how long that takes."""
    command: list[str] = []
    """Or any other program, argument by argument."""
    port: PositiveInt
    """On which it listens, on loopback."""
    health: str = "/health"
    """Path that answers 200 when it is ready."""
    start_timeout_s: PositiveFloat = 300.0
    """For it to become ready."""


class Cluster(Section):
    """With this section a recipe runs on a Ray cluster, without it in one process."""

    runtime: Literal["auto", "local", "ray"] = "auto"
    """auto: ray where the recipe has a `cluster` section. local: in this process, on one device."""
    address: str = "auto"
    """Of the Ray cluster, `10.0.0.1:6379`. auto: the one that runs on this machine, else one is started for the run."""
    nodes: PositiveInt = 1
    devices_per_node: PositiveInt = 1
    """GPUs of each node; on nodes without, worker slots."""
    placement: dict[str, str | int | list[int]] = {"actor,rollout,reference,critic": "all"}
    """Roles to devices: `all`, `0-19` (inclusive), `0,2,5`, `[0, 1]`, `list(range(0, 4))`."""
    transfer: Literal["auto", "shared", "collective", "object", "ipc"] = "auto"
    """How new weights reach the rollout. shared: within a process. collective: broadcast (NCCL, gloo). object: through
    Ray's object store. ipc: through memory of the node that both processes map; of a GPU, only if both see it. auto:
    shared where actor and rollout have the same devices, else collective."""
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
    """For devices to become free and workers to start."""
    call_timeout_s: PositiveFloat = 3600.0
    """For any one thing that a worker is asked to do."""
    node_timeout_s: PositiveFloat = 20.0
    """A node that does not answer for so long is lost."""


class Recipe(Section):
    name: str
    """Of the run folder."""
    seed: NaturalInt = 0
    model: Model
    data: Data
    environment: Environment = Environment()
    environments: dict[str, TaggedEnvironment] = {}
    """Several, by a tag of your choice, instead of `environment`. Metrics are told apart by it."""
    rollout: Rollout = Rollout()
    batch: Batch = Batch()
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer = Optimizer()
    critic: Critic = Critic()
    reference: Reference = Reference()
    train: Train = Train()
    schedule: Schedule = Schedule()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    logging: Logging = Logging()
    cluster: Cluster = Cluster()

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
