"""The recipe: every key a user may write, with its type, default and meaning.

Strict: a key that is not here is an error. This module only describes; reading YAML and overrides is `load.py`, checks
across keys are `rules.py`, and what follows from a recipe is `plan.py`. The text under a field is its entry in the
reference (`docs/recipe.md`). A field left at None means "decided elsewhere": by the algorithm's preset, by the model,
or not used at all.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from corral.recipe.parts import PRESETS, KLPlace

PositiveInt = Annotated[int, Field(ge=1)]
NaturalInt = Annotated[int, Field(ge=0)]
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

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class Model(Section):
    """The model that is trained."""

    path: str
    """A folder in Hugging Face layout, a hub name, or a built-in model: `smollm2-135m-instruct`, or `blank-1m`, which
    reads bytes and is not trained yet."""
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


class Source(Section):
    """Rows: files (parquet, jsonl; globs allowed), a data set on a hub, a generated task, or a Python function."""

    path: str | list[str]
    """`rows.parquet`, `data/*.jsonl`, `hf:openai/gsm8k`, `reasoning_gym:chain_sum`, `arithmetic:addition`,
    `pictures:colors`,
    `module:function`, or `boards`: numbers from which a game's environment makes its boards."""
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
    """Use at most so many rows of the source, from its beginning."""


class Data(Section):
    """The prompts, and what is known about them."""

    train: Source
    validation: Source | None = None
    prompt_key: str = "prompt"
    """Column with the question: text, or a list of chat messages."""
    answer_key: str | None = None
    """Column with the reference answer. None: `answer`, else verl's `reward_model.ground_truth`."""
    images_key: str = "images"
    """Column with the images of the prompt, for models that read images: paths (relative to the data file) or bytes.
    `<image>` in the prompt's text says where each of them is; without it they come first."""
    system: str | None = None
    """System message put before every prompt."""
    template: str | None = None
    """Text with `{prompt}` in it, put around the last user message."""
    chat: bool = True
    """Render prompts with the chat template. False: the prompt's text is tokenized as it is."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt in tokens, after the chat template."""
    overlong: Literal["error", "filter", "truncate_left", "truncate_right"] = "error"
    """What happens to a prompt with more tokens than `max_prompt_tokens`. Such prompts are counted and reported."""
    shuffle: bool = True
    """Order rows differently in every epoch; the order follows from `seed` and the epoch's number."""


class Reward(Section):
    """The function that scores answers."""

    name: str = "exact"
    """exact, regex, number, gsm8k, math, reasoning_gym, em, sub_em, f1, search_r1, by_source (one of them, by the row's
    `data_source`), or `module:function` / `file.py:function`."""
    options: dict[str, Any] = {}
    """Keyword arguments for the reward function."""
    timeout_s: PositiveFloat = 10.0
    """Seconds after which a call of the reward function is killed and the sample gets `on_error`."""
    workers: PositiveInt = 2
    """Processes that run the reward function."""
    on_error: float = 0.0
    """Reward of a sample whose reward function raised or hung."""


class Environment(Section):
    """What answers the model, and how its answers are rewarded."""

    name: str = "question"
    """question, frozen_lake, sokoban, search, tools, agent, gymnasium, reasoning_gym, or `module:Class`."""
    options: dict[str, Any] = {}
    """Arguments of the environment's class."""
    reward: Reward = Reward()
    timeout_s: PositiveFloat = 60.0
    """Seconds that one reset or step may take."""
    concurrency: PositiveInt | None = None
    """Trajectories in progress at the same time on a worker. None: all of them."""
    processes: PositiveInt = 8
    """For an environment whose methods block: trajectories in progress at the same time, each in its own process."""


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
    top_k: NaturalInt = 0
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
    """Most tokens in one forward and backward pass; tokens with the same prefix count once."""


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
    advantage_clip: PositiveFloat | None = None
    """A token's advantage is at most this, and at least its negative; after whitening, where there is any."""
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
    """AdamW's weight decay."""
    max_gradient_norm: PositiveFloat = 1.0
    """A gradient with a larger norm is scaled down to this."""
    warmup_steps: NaturalInt = 0
    """Updates in which the learning rate rises linearly."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Fraction of all updates that are warm-up, instead of `warmup_steps`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after warm-up, until the last update."""
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


class Reference(Section):
    """The frozen model that the KL is measured to. There is none without KL."""

    path: str | None = None
    """The reference model. None: the model as it was before training."""


class Parallel(Section):
    """How a model is spread over the devices of its role: their number is replicate x shard x expert x context x
    tensor."""

    replicate: PositiveInt = 1
    """Copies of the sharded model (HSDP)."""
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


class Train(Section):
    """How gradients are computed."""

    parallel: Parallel = Parallel()
    offload: list[Literal["parameters", "gradients", "optimizer"]] = []
    """What lives in the host's memory while the device does not compute with it."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass (less memory, a third more work)."""
    logits_chunk: PositiveInt | None = None
    """Tokens whose logits exist at the same time. None: 256 on a CPU, 8192 on a GPU."""
    threads: PositiveInt | None = None
    """CPU threads of the trainer. None: all cores."""


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
    keep: PositiveInt = 2
    """Number of newest checkpoints that are kept."""
    at_end: bool = True
    """Save a checkpoint after the last step."""
    resume: str = "auto"
    """auto: go on where this run stopped. never: start anew, in a folder of its own. Or a checkpoint's path."""


class Logging(Section):
    """What is recorded."""

    runs: str = "runs"
    """Folder in which the run's folder is made."""
    trackers: list[Literal["console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]] = ["console"]
    """Where metrics go; metrics.jsonl is always written."""
    project: str = "corral"
    """The project's name in trackers that have projects."""
    samples: NaturalInt = 2
    """Answers printed after each validation."""
    trajectories: bool = True
    """Write every trajectory to the run folder."""


class Service(Section):
    """A program that runs beside the workers on every node, such as a retriever, and is started again if it dies."""

    retriever: str | None = None
    """An index made by `corral retriever build`, to be served as `corral retriever serve` does."""
    corpus: str | None = None
    """The corpus of that index, for a plan that says how large the index will be and how long it takes to build."""
    command: list[str] = []
    """Any other program to run, argument by argument."""
    port: PositiveInt
    """Port on which the program listens, on loopback."""
    health: str = "/health"
    """Path that answers 200 when the program is ready."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds in which the program has to become ready."""


class Cluster(Section):
    """With this section a recipe runs on a Ray cluster, without it in one process."""

    runtime: Literal["auto", "local", "ray"] = "auto"
    """auto: ray where the recipe has a `cluster` section. local: in this process, on one device."""
    address: str = "auto"
    """Address of the Ray cluster, `10.0.0.1:6379`. auto: the one that runs on this machine, else one is started for the
    run."""
    nodes: PositiveInt = 1
    """Number of machines."""
    devices_per_node: PositiveInt = 1
    """GPUs of each node; on nodes without, worker slots."""
    device_memory: PositiveFloat | None = None
    """Memory of a device in GiB. With it a plan that does not fit is an error, on whatever machine it is made."""
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
    """Seconds in which devices have to become free and workers to start."""
    call_timeout_s: PositiveFloat = 3600.0
    """Seconds that any one call of a worker may take."""
    node_timeout_s: PositiveFloat = 20.0
    """A node that does not answer for so many seconds is lost."""


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

    @property
    def code_names(self) -> dict[tuple[str, ...], str]:
        """Names, by their keys, that may be `module:name` or `file.py:name` of the user's: what runs in the workers."""
        names: dict[tuple[str, ...], str | None] = {
            ("algorithm", "advantage", "name"): self.algorithm.advantage.name,
            ("algorithm", "loss", "name"): self.algorithm.loss.name,
        }
        for tag, environment in self.tagged_environments.items():
            where = ("environments", tag) if tag else ("environment",)
            names |= {(*where, "name"): environment.name, (*where, "reward", "name"): environment.reward.name}
        return {key: name for key, name in names.items() if name is not None and ":" in name}
