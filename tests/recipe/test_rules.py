"""What a recipe may not say. Each problem names its key and the reason."""

import pytest
from recipe_texts import MINIMAL

from corral.recipe.errors import RecipeError
from corral.recipe.parts import PRESETS
from corral.recipe.plan import make_plan
from corral.recipe.rules import check

VALIDATED = "data.validation.path=test.jsonl"
APART = 'cluster.devices_per_node=4 cluster.placement={"actor,reference,critic":0-1,"rollout":2-3}'
"""Rollout with devices of its own."""
TOGETHER = "cluster.devices_per_node=4"
GAMES = "data.train.path=boards environments.lake.name=frozen_lake environments.boxes.name=sokoban"
GAMES_TO_VALIDATE = f"{GAMES} data.validation.path=boards data.validation.seed=1"


def problems_of(recipe) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        check(recipe)
    return list(caught.value.problems)


def test_a_minimal_recipe_has_neither_problems_nor_warnings(load):
    assert check(load()) == []


@pytest.mark.parametrize("name", PRESETS)
def test_any_algorithm_can_be_put_in_by_name_where_nothing_else_is_said_about_it(load, name):
    teacher = ["reference.path=a/teacher"] if name == "distill" else []
    assert check(load(f"algorithm.name={name}", *teacher)) == []


# --- keys without effect: (overrides, of which the last one has none, part of the reason)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ("algorithm.kl.coefficient=0.1", "there is no KL in this recipe"),
        ("rollout.engine.memory_fraction=0.3", "only vllm and sglang have it"),
        ("rollout.engine.python=x", "the native engine runs in the trainers' process"),
        ("rollout.engine=vllm rollout.engine.own_process=true", "vllm always has a process of its own"),
        ("algorithm.kl.estimator=k1", "there is no KL in this recipe"),
        ("algorithm.kl.controller=fixed", "there is no KL in this recipe"),
        ("reference.path=x", "there is no KL in this recipe"),
        ("critic.path=x", "the advantage grpo needs no critic"),
        ("critic.value_clip=0.2", "the advantage grpo needs no critic"),
        ("critic.optimizer.learning_rate=1", "the advantage grpo needs no critic"),
        ("algorithm.old_logprobs=recompute algorithm.max_mean_ratio=2", "the ratios of the first are 1"),
        ("environments.quiz.weight=2", "only `path: boards` is mixed by weights"),
        (f"{GAMES} environments.lake.validation_weight=2", "only `data.validation.path: boards` is mixed by weights"),
        (
            f"{GAMES_TO_VALIDATE} data.train.path=rows.jsonl environments.lake.validation_weight=1 "
            "environments.lake.weight=2",
            "only boards to validate on, and `environments.lake.validation_weight` says how many",
        ),
        ("algorithm.dynamic_sampling.max_rounds=3", "dynamic sampling is off"),
        ("validation.every=5", "there is no `data.validation`"),
        ("validation.before_training=false", "there is no `data.validation`"),
        (f"{VALIDATED} validation.top_p=0.9", "the most likely token is taken"),
        ("data.train.size=5", "rows in files are not generated"),
        ("data.train.seed=5", "rows in files are not generated"),
        ('data.train.options={"x":5}', "rows in files are not generated"),
        ("data.train.split=test", "only hub data sets"),
        ("data.train.subset=main", "only hub data sets"),
        (f"{VALIDATED} data.validation.size=5", "rows in files are not generated"),
        ("data.train.path=hf:a/b data.train.size=5", "a hub data set is not generated"),
        ("data.train.path=module:function data.train.size=5", "a function gets its arguments"),
        ("data.train.path=arithmetic:addition data.train.split=x", "only hub data sets"),
        ("data.chat=false data.system=x", "with `data.chat: false` there is no chat"),
        ("data.chat=false model.chat_template=x", "with `data.chat: false` there is no chat"),
        ("optimizer.min_learning_rate_ratio=0.1", "`optimizer.schedule` is constant"),
        ("algorithm.name=ppo critic.optimizer.min_learning_rate_ratio=0.1", "`critic.optimizer.schedule` is constant"),
        ("environment.timeout_s=5", "`environment.reward.timeout_s`"),
        ("environment.name=search environment.timeout_s=5", "`environment.options.patience_s`"),
        ("environment.name=tools environment.timeout_s=5", "`environment.options.tool_timeout_s`"),
        ("environment.name=agent environment.processes=2", "agent does not block"),
        ("logging.project=x", "none of `logging.trackers` has projects"),
        ("checkpoint.best=validation/mean@1", "there is no `data.validation`"),
        ("logging.tracked_samples=3", "names no tracker but the console"),
        ("logging.names=verl", "`logging.trackers` names no tracker but the console"),
        ("schedule.pipelined=true", "actor and rollout share their devices"),
        (f"{TOGETHER} schedule.pipelined=true", "give rollout devices of its own"),
        ("cluster.runtime=local cluster.address=a:1", "there is no cluster, only this process"),
        ("cluster.runtime=local cluster.nodes=1", "there is no cluster"),
        ("cluster.runtime=local cluster.max_restarts=1", "there is no cluster"),
        ('cluster.runtime=local cluster.placement={"actor,rollout":0}', "there is no cluster"),
    ],
)
def test_a_key_that_would_have_no_effect_is_a_problem_that_says_why(load, overrides, reason):
    *_, last = overrides.split()
    (problem,) = problems_of(load(*overrides.split()))
    assert problem.startswith(f"`{last.partition('=')[0]}` has no effect: ")
    assert reason in problem


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm.kl.where=loss algorithm.kl.coefficient=0.1 algorithm.kl.estimator=k3 reference.path=x",
        "algorithm.name=ppo algorithm.kl.coefficient=0.1 critic.path=x algorithm.advantage.gamma=0.9 "
        "algorithm.advantage.gae_lambda=0.9",
        "algorithm.kl.where=loss algorithm.kl.controller=adaptive algorithm.kl.controller.target=1 "
        "algorithm.kl.controller.horizon=10",
        "algorithm.loss.clip_low=0.1 algorithm.loss.clip_high=0.3 algorithm.loss.dual_clip=3",
        "algorithm.name=gspo algorithm.loss.clip_low=1e-4 algorithm.aggregation=seq_mean_token_mean",
        "algorithm.name=dr_grpo algorithm.aggregation.norm=100",
        "algorithm.name=dapo algorithm.dynamic_sampling.max_rounds=3",
        "algorithm.shaping=overlong algorithm.shaping.buffer_tokens=64 algorithm.shaping.penalty=0.5",
        "algorithm.correction.name=rejection algorithm.correction.level=sequence algorithm.old_logprobs=recompute",
        "data.train.path=hf:openai/gsm8k data.train.split=train data.train.subset=main",
        "data.train.path=reasoning_gym:chain_sum data.train.size=100 data.train.seed=1 data.train.options.x=1",
        "data.train.path=module:function data.train.options.x=1",
        f"{VALIDATED} validation.every=5 validation.temperature=1 validation.top_p=0.9",
        "optimizer.schedule=cosine optimizer.min_learning_rate_ratio=0.1",
        "optimizer.warmup_ratio=0.1",
        "optimizer.warmup_ratio=null optimizer.warmup_steps=3",
        "algorithm.name=ppo critic.optimizer.warmup_ratio=0.1 optimizer.warmup_steps=3",
        "algorithm.reward_clip=1 algorithm.advantage_clip=5 algorithm.max_mean_ratio=2",
        "algorithm.max_mean_ratio=2 algorithm.old_logprobs=recompute batch.ppo_epochs=2",
        f"{GAMES} environments.lake.weight=0",
        f"{GAMES_TO_VALIDATE} environments.lake.weight=0 environments.lake.validation_weight=1",
        f"{GAMES_TO_VALIDATE} environments.lake.validation_weight=0",
        f"{GAMES_TO_VALIDATE} data.train.path=rows.jsonl environments.lake.weight=2",
        f"{GAMES} {VALIDATED} environments.quiz.weight=0",
        "environment.name=module:Class environment.timeout_s=5 rollout.max_turns=3",
        "environment.name=tools environment.processes=2",
        "logging.trackers=[wandb] logging.project=x logging.names=verl logging.tracked_samples=0",
        "logging.trackers=[mlflow] logging.tracked_samples=2",
        "logging.trackers=[swanlab] logging.tracked_samples=2",
        "logging.prometheus.port=9000",
        "logging.prometheus.host=0.0.0.0 logging.prometheus.token_file=token",
        "batch.updates_per_step=4 batch.ppo_epochs=2",
        "algorithm.loss.clip_low=null reference.path=null algorithm.advantage=null algorithm.kl.estimator=null",
        "cluster.runtime=local cluster.min_nodes=null",
        "cluster.runtime=ray",
        "cluster.nodes=2 cluster.min_nodes=1",
        f"{APART} schedule.max_staleness=2 algorithm.correction.cap=3",
        f"{APART} schedule.max_staleness=2 algorithm.correction.name=icepop algorithm.correction.floor=0.2",
        f"{APART} schedule.max_staleness=1 schedule.pipelined=true",
        f"{APART} schedule.pipelined=true algorithm.kl.where=loss",
        f"{APART} schedule.pipelined=false batch.ppo_epochs=2",
        f"{TOGETHER} train.parallel.tensor=2",
        f"{TOGETHER} train.parallel.shard=2 train.parallel.replicate=2 train.offload=[parameters,gradients,optimizer]",
        f"{TOGETHER} train.parallel.shard=1 train.parallel.replicate=4 train.offload=[optimizer]",
        f"{APART} algorithm.name=ppo train.parallel.tensor=2",
        f"{TOGETHER} algorithm.name=ppo train.parallel.pipeline=2 train.offload=[parameters,gradients]",
        f"{TOGETHER} cluster.transfer=shared",
        f"{APART} cluster.transfer=ipc",
        f"{APART} cluster.transfer=collective",
        f"{APART} cluster.transfer=object",
    ],
)
def test_a_key_that_has_an_effect_is_no_problem(load, overrides):
    assert check(load(*overrides.split())) == []


@pytest.mark.parametrize("loss", ["gspo", "sapo", "gmpo"])
def test_a_loss_that_is_a_mean_over_sequences_allows_no_other_aggregation(load, loss):
    assert problems_of(load(f"algorithm.loss={loss}", "algorithm.aggregation=token_mean")) == [
        f"`algorithm.aggregation: token_mean` has no effect: the loss {loss} is always seq_mean_token_mean"
    ]


@pytest.mark.parametrize("where", ["optimizer", "critic.optimizer"])
def test_warm_up_is_a_number_of_updates_or_a_fraction_of_them(load, where):
    assert problems_of(load("algorithm.name=ppo", f"{where}.warmup_steps=0", f"{where}.warmup_ratio=0.1")) == [
        f"`{where}.warmup_steps` and `{where}.warmup_ratio` are both set; keep one of them"
    ]


@pytest.mark.parametrize(
    ("weights", "part", "key"),
    [
        (("weight=0", "validation_weight=1"), "train", "weight"),
        (("validation_weight=0",), "validation", "validation_weight"),
    ],
)
def test_not_all_mixing_weights_are_zero(load, weights, part, key):
    written = [f"environments.{tag}.{weight}" for tag in ("lake", "boxes") for weight in weights]
    assert problems_of(load(*GAMES_TO_VALIDATE.split(), *written)) == [
        f"`environments`: all weights of `data.{part}.path: boards` are 0; give one of them a `{key}`"
    ]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            "algorithm.correction.name=token_tis",
            "`algorithm.correction.name: token_tis` has no effect with `algorithm.old_logprobs: engine` ... "
            "set `algorithm.old_logprobs: recompute`",
        ),
        (
            f"{APART} schedule.max_staleness=1 algorithm.old_logprobs=engine",
            "`algorithm.old_logprobs: engine` leaves the correction without effect that `schedule.max_staleness: 1` "
            "brings with it (token_tis) ... set `algorithm.correction.name: none`",
        ),
        (
            f"{GAMES} environments.quiz.name=question",
            "`data.train.path: boards` is for games, and `question` needs rows with a prompt",
        ),
        ("rollout.max_turns=3", "`rollout.max_turns: 3` has no effect: a question has one turn"),
        ("algorithm.whiten_by=rewards", "`algorithm.whiten_by` has no effect: nothing is whitened with the advantage"),
        (
            "algorithm.whiten_by=rewards algorithm.whiten=true",
            "`algorithm.whiten_by: rewards` has no effect: no `environment.rewards` are for some `sources` alone",
        ),
        (
            "algorithm.name=reinforce algorithm.lone_sample=raw",
            "`algorithm.lone_sample` has no effect: the advantage reinforce does not compare",
        ),
        (
            "batch.samples_per_prompt=1 algorithm.name=ppo algorithm.dynamic_sampling.enabled=true",
            "`batch.samples_per_prompt: 1` with dynamic sampling ... every group would be dropped",
        ),
        (
            "batch.prompts_per_step=2 batch.samples_per_prompt=4 batch.updates_per_step=9",
            "`batch.updates_per_step: 9` is more than a step's 8 trajectories",
        ),
        (
            "algorithm.shaping=overlong algorithm.shaping.buffer_tokens=257",
            "`algorithm.shaping.buffer_tokens: 257` is more than `rollout.max_response_tokens: 256`",
        ),
        ("data.template=Think!", "`data.template` has no `{prompt}` in it"),
        ("~schedule.steps", " ... set `schedule.steps` or `schedule.epochs`"),
        ("schedule.epochs=1", "`schedule.steps` and `schedule.epochs` are both set; keep one of them"),
        (f"name={'x' * 300}", "`name` is 300 bytes long; as the name of a folder it may have 200"),
        (
            "cluster.runtime=local cluster.nodes=2 cluster.devices_per_node=4",
            "`cluster.runtime: local` is one process on one device, and `cluster.nodes` x `cluster.devices_per_node` "
            "is 8",
        ),
        ("cluster.nodes=2 cluster.min_nodes=3", "`cluster.min_nodes: 3` is more than `cluster.nodes: 2`"),
        (
            f"{APART} cluster.transfer=shared",
            "`cluster.transfer: shared` is within a process, but actor (0-1) and rollout (2-3) are on different",
        ),
        (
            'cluster.nodes=2 cluster.placement={"actor":0,"rollout":1} cluster.transfer=ipc',
            "`cluster.transfer: ipc` goes through the memory of one node, and `cluster.nodes` is 2",
        ),
    ],
)
def test_what_contradicts_itself_is_a_problem(load, overrides, problem):
    """`problem`: how it begins and how it ends."""
    begin, _, end = problem.partition(" ... ")
    (found,) = problems_of(load(*overrides.split()))
    assert found.startswith(begin)
    assert found.endswith(end)


# --- several sources and curricula

SOURCES = MINIMAL.replace("path: rows.jsonl", "sources: {a: {path: a.jsonl, weight: 3}, b: {path: b.jsonl, weight: 1}}")


def test_several_sources_are_part_of_the_plan(load):
    assert SOURCES != MINIMAL
    assert "  a: 0.75 of the prompts, from a.jsonl\n  b: 0.25 of the prompts" in make_plan(load(text=SOURCES)).text()
    assert "data\n" not in make_plan(load()).text()


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["data.train.path=x.jsonl"], "`data.train.path` has no effect: `data.train.sources` are in its place"),
        (["data.train.sources.b.weight=null"], "`data.train.sources`: some have a `weight` and others have none"),
        (["data.train.sources.c d={path: x, weight: 1}"], "'c d' becomes part of metrics' names"),
        (["data.train.sources.b.path=boards"], "`data.train.sources.b.path: boards`: boards of several games"),
        (["data.train.sources.b.split=x"], "`data.train.sources.b.split` has no effect: only hub data sets"),
        (["data.train.sources.b.filters={rate: [1, 0]}"], "`data.train.sources.b.filters.rate: [1, 0]` leaves nothing"),
        (["data.validation.sources.x={path: x, weight: 1}"], "`data.validation.sources.x.weight` has no effect"),
        (["data.curriculum.descending=true"], "`data.curriculum.descending` has no effect: there is no"),
        (["algorithm.name=sft", "data.curriculum.descending=true"], "`data.curriculum.descending` has no effect: "),
        (["data.curriculum.others=0.5"], "`data.curriculum.others` has no effect: there is no"),
        (["data.curriculum.solved_reward=2"], "`data.curriculum.solved_reward` has no effect: there is no"),
        (["data.curriculum.mean_reward=[1, 0]"], "`data.curriculum.mean_reward: [1, 0]` has no reward in it"),
        (["algorithm.name=sft", "data.curriculum.skip_solved=2"], "sft trains on rows, which have no rewards"),
    ],
)
def test_keys_of_sources_and_curricula_that_do_not_go_together(load, overrides, problem):
    found = problems_of(load(*overrides, text=SOURCES))
    assert any(problem in one for one in found), found


def test_a_curriculum_is_part_of_the_plan(load):
    curriculum = "data.curriculum={mean_reward: [0.1, 0.9], skip_solved: 2, order_by: level}"
    text = make_plan(load(curriculum, "data.train.filters={rate: [0.5, null]}")).text()
    for line in (
        "only rows with `rate` in [0.5, inf]",
        "each epoch goes from the lowest to the highest `level`",
        "rows whose mean reward so far is outside [0.1, 0.9] are drawn in 0.1 of the epochs",
        "rows solved in every sample 2 times in a row are skipped from then on",
    ):
        assert line in text


# --- numbers that do not go together


@pytest.mark.parametrize(
    "advantage", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"]
)
def test_an_advantage_within_a_group_warns_of_one_sample(load, advantage):
    (warning,) = check(load("batch.samples_per_prompt=1", f"algorithm.advantage={advantage}"))
    assert warning.startswith("`batch.samples_per_prompt: 1` with the advantage " + advantage)
    assert "all advantages are zero, and nothing is learned from rewards" in warning
    raw = ("batch.samples_per_prompt=1", "algorithm.lone_sample=raw")
    assert check(load(*raw, f"algorithm.advantage={advantage}")) == []


@pytest.mark.parametrize("name", ["ppo", "reinforce", "reinforce_plus_plus", "remax"])
def test_other_advantages_are_content_with_one_sample(load, name):
    assert check(load("batch.samples_per_prompt=1", f"algorithm.name={name}")) == []


def test_activations_are_offloaded_where_they_are_checkpointed(load):
    (problem,) = problems_of(load("train.offload=[activations]"))
    assert problem.endswith("set `train.gradient_checkpointing: true`")
    for value in ("true", "selective"):
        assert check(load("train.offload=[activations]", f"train.gradient_checkpointing={value}")) == []


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", " ", "a:b", "a\\b", " a", "a?", ".a"])
def test_a_name_that_cannot_be_a_folder_is_a_problem(load, name):
    (problem,) = problems_of(load(f'name="{name}"'.replace("\\", "\\\\")))
    assert "cannot be the name of a folder" in problem


@pytest.mark.parametrize("name", ["gsm8k", "run 1", "运行", "a.b-c_d"])
def test_other_names_are_fine(load, name):
    assert check(load(f"name={name}")) == []


# --- placement


def test_a_needed_role_without_devices_is_a_problem(load):
    assert problems_of(load("cluster.placement={actor: 0}", "algorithm.name=ppo")) == [
        f"`cluster.placement` has no devices for {role}, which the recipe (ppo) needs"
        for role in ("rollout", "reference", "critic")
    ]


def test_problems_of_the_placement_come_with_all_others(load):
    found = problems_of(load("cluster.placement.actor=7", "schedule.epochs=1"))
    assert len(found) == 2
    assert "device 7 does not exist" in found[1]


def test_a_role_that_is_placed_alone_and_not_needed_is_a_warning(load):
    recipe = load("cluster.devices_per_node=2", 'cluster.placement={"actor,rollout": 0, critic: 1}')
    assert check(recipe) == [
        "`cluster.placement`: nothing uses `critic`, because the recipe (grpo) has no such role",
        "`cluster.placement`: nothing uses device 1",
    ]


def test_a_role_that_is_placed_with_others_and_not_needed_is_fine(load):
    assert check(load('cluster.placement={"actor,rollout,critic": all}')) == []


# --- devices


@pytest.mark.parametrize("placed", ["", TOGETHER, 'cluster.nodes=2 cluster.placement={"actor,rollout":0-1}'])
def test_an_engine_on_the_trainers_device_cannot_run_ahead_of_it(load, placed):
    assert problems_of(load(*placed.split(), "schedule.max_staleness=2")) == [
        "`schedule.max_staleness: 2`: an engine that shares its device with the trainer cannot run ahead of it; give "
        "rollout devices of its own in `cluster.placement`, or leave `schedule.max_staleness` at 0"
    ]


@pytest.mark.parametrize("transfer", ["collective", "object", "ipc"])
def test_weights_do_not_travel_where_actor_and_rollout_are_together(load, transfer):
    (problem,) = problems_of(load(*TOGETHER.split(), f"cluster.transfer={transfer}"))
    assert problem.startswith(f"`cluster.transfer: {transfer}` has no effect: actor and rollout share their devices")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("train.parallel.tensor=2", "tensor 2 = 2 does not divide the 1 device of actor"),
        ("train.parallel.shard=2", "shard 2 = 2 is not the 1 device of actor"),
        (f"{TOGETHER} train.parallel.pipeline=3", "pipeline 3 = 3 does not divide the 4 devices of actor"),
        (f"{TOGETHER} train.parallel.context=3", "context 3 = 3 does not divide the 4 devices of actor"),
        (
            f"{TOGETHER} train.parallel.shard=1",
            "shard 1 = 1 is not the 4 devices of actor; `shard: 4` or `replicate: 4` would be",
        ),
        (f"{TOGETHER} train.parallel.shard=2 train.parallel.expert=4", "shard 2 x expert 4 = 8 is not the 4 devices"),
        (f"{TOGETHER} algorithm.name=ppo train.parallel.tensor=3", "tensor 3 = 3 does not divide the 4 devices of"),
        (
            "algorithm.name=ppo cluster.devices_per_node=4 train.parallel.tensor=2 "
            'cluster.placement={"actor,rollout":0-1,"critic":2,"reference":3}',
            "tensor 2 = 2 does not divide the 1 device of reference",
        ),
    ],
)
def test_a_model_is_spread_over_the_devices_that_there_are(load, overrides, problem):
    found, *others = problems_of(load(*overrides.split()))
    assert found.startswith(f"`train.parallel`: {problem}")
    assert [other.rsplit(" ", 1)[1] for other in others] == ["critic"] * ('"critic":2' in overrides)


@pytest.mark.parametrize("part", ["parameters", "gradients"])
@pytest.mark.parametrize("whole", ["", f"{TOGETHER} train.parallel.shard=1 train.parallel.replicate=4"])
def test_a_whole_model_is_not_offloaded(load, part, whole):
    (problem,) = problems_of(load(*whole.split(), f"train.offload=[optimizer,{part}]"))
    assert problem.startswith(f"`train.offload: {part}` needs a sharded model, and every device of actor holds a whole")


@pytest.mark.parametrize("part", ["parameters", "gradients"])
def test_parameters_and_gradients_are_offloaded_together(load, part):
    (problem,) = problems_of(load(*TOGETHER.split(), f"train.offload=[optimizer,{part}]"))
    assert problem == "`train.offload`: parameters and gradients go together; name both or neither"


# --- warnings


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        ("rollout.top_p=0.9", "`rollout.top_p: 0.9` samples from a truncated distribution"),
        ("rollout.top_k=50", "`rollout.top_k: 50` samples from a truncated distribution"),
        ("rollout.min_p=0.1", "`rollout.min_p: 0.1` samples from a truncated distribution"),
        ("optimizer.learning_rate=0.01", "`optimizer.learning_rate: 0.01` is unusually high"),
        ("batch.updates_per_step=6", "64 trajectories do not divide into 6 updates: the last 2 have one less"),
        ("algorithm.name=gpg batch.ppo_epochs=2", "the loss gpg has nothing that keeps the later updates"),
        ("algorithm.name=ppo critic.warmup_steps=10", "`critic.warmup_steps: 10` covers all 10 steps"),
        ("optimizer.warmup_steps=10", "`optimizer.warmup_steps: 10` covers all 10 updates"),
        ("optimizer.warmup_ratio=0.05", "`optimizer.warmup_ratio: 0.05` of 10 updates is less than one"),
        ("algorithm.name=ppo critic.optimizer.warmup_ratio=0.05", "`critic.optimizer.warmup_ratio: 0.05` of 10"),
        ("checkpoint.every=11", "`checkpoint.every: 11` is more than the 10 steps"),
        (f"{VALIDATED} validation.every=11", "`validation.every: 11` is more than the 10 steps"),
        (f"{VALIDATED} validation.samples_per_prompt=4", "`validation.samples_per_prompt: 4` with"),
        ("algorithm.kl.where=loss algorithm.kl.estimator=k1", "`algorithm.kl.estimator: k1` in the loss"),
        (
            f"{APART} schedule.max_staleness=2 algorithm.correction.name=none",
            "`schedule.max_staleness: 2` with `algorithm.correction.name: none`: tokens that older weights sampled are",
        ),
        (
            f"{APART} schedule.max_staleness=2 algorithm.correction.name=none algorithm.old_logprobs=engine",
            "`schedule.max_staleness: 2` with `algorithm.correction.name: none`: that tokens were sampled by older",
        ),
    ],
)
def test_what_is_allowed_but_doubtful_is_a_warning(load, overrides, warning):
    (found,) = check(load(*overrides.split()))
    assert found.startswith(warning)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ("algorithm.name=dapo", "dynamic sampling"),
        ("batch.ppo_epochs=2", "`batch.ppo_epochs: 2`"),
        ("batch.updates_per_step=4", "`batch.updates_per_step: 4`"),
        ("algorithm.name=ppo", "the advantage gae, which needs the whole batch"),
        ("algorithm.name=reinforce_plus_plus", "the advantage reinforce_plus_plus, which needs the whole batch"),
        ("algorithm.name=reinforce_plus_plus_baseline", "the advantage reinforce_plus_plus_baseline, which needs"),
        ("algorithm.name=gpg", "the advantage gpg, which needs the whole batch"),
        ("algorithm.llds_coefficient=0.1", "`algorithm.llds_coefficient`, whose divisor depends on the whole batch"),
        ("algorithm.name=dapo batch.ppo_epochs=2", "dynamic sampling and `batch.ppo_epochs: 2`; "),
    ],
)
def test_what_makes_a_pipeline_wait_is_a_warning(load, overrides, reason):
    (found,) = check(load(*APART.split(), "schedule.pipelined=true", "algorithm.kl.where=loss", *overrides.split()))
    assert found.startswith(f"`schedule.pipelined`: training waits for the whole step because of {reason}")
    assert found.endswith("only log-probs and values are computed while the rest is generated")


def test_a_pipeline_with_nothing_to_do_is_a_warning(load):
    (found,) = check(load(*APART.split(), "schedule.pipelined=true", "batch.ppo_epochs=2"))
    assert found.endswith("this recipe computes no log-probs before training, so nothing is left to do meanwhile")


def test_all_problems_are_reported_at_once(load):
    text = MINIMAL + "reference: {path: x}\ncritic: {path: x}\nvalidation: {every: 1}\n"
    assert len(problems_of(load("schedule.epochs=2", text=text))) == 4


# --- engines


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("rollout.engine=vllm rollout.temperature=0.7 rollout.top_p=0.9", "those after the exclusion of tokens"),
        (f"rollout.engine.tensor_parallel=2 {APART}", "one that does not fit is for `rollout.engine: vllm`"),
        ("rollout.engine=vllm rollout.engine.tensor_parallel=2 cluster.devices_per_node=3", "not divide the 3 devices"),
        (
            "rollout.engine=vllm rollout.engine.tensor_parallel=2 cluster.nodes=2 cluster.devices_per_node=3",
            "an engine would have devices 2-3, which are on several nodes",
        ),
        ("rollout.engine=vllm algorithm.old_logprobs=engine", "that `rollout.engine: vllm` brings with it (token_tis)"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(load, overrides, problem):
    assert any(problem in found for found in problems_of(load(*overrides.split())))


@pytest.mark.parametrize("overrides", ["rollout.temperature=0.7", "rollout.top_p=0.9", APART])
def test_what_vllm_can_do_is_not(load, overrides):
    check(load("rollout.engine=vllm", *overrides.split()))


# --- supervised fine-tuning


SFT = "algorithm.name=sft"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("batch.samples_per_prompt=4", "`batch.samples_per_prompt` has no effect: sft trains on rows"),
        ("algorithm.kl.where=loss", "`algorithm.kl` has no effect: sft trains on rows"),
        ("algorithm.correction=token_tis", "`algorithm.correction` has no effect: sft trains on rows"),
        ("algorithm.advantage=grpo", "`algorithm.advantage` has no effect: sft trains on rows"),
        ("algorithm.whiten=true", "`algorithm.whiten` has no effect: sft trains on rows"),
        ("schedule.pipelined=true", "`schedule.pipelined` has no effect: sft trains on rows"),
        ("rollout.temperature=0.7", "`rollout.temperature` has no effect: sft trains on rows"),
        ("rollout.max_response_tokens=64", "`rollout.max_response_tokens` has no effect: nothing is generated"),
        ("environment.reward.name=exact", "`environment` has no effect: there is no `data.validation`"),
        (f"{VALIDATED} validation.temperature=1", "`validation.temperature` has no effect: without an `environment`"),
        ("batch.ppo_epochs=2", "`batch.ppo_epochs`: rows are gone over again"),
        ("data.train.path=boards", "`data.train.path: boards`: boards have no answers to train on"),
        ("algorithm.loss=ppo", "`algorithm.loss: ppo`: `algorithm.name: sft` trains on rows"),
        ("critic.path=x", "`critic.path` has no effect: the advantage none needs no critic"),
    ],
)
def test_what_has_no_effect_on_rows_is_refused(load, overrides, expected):
    assert any(expected in problem for problem in problems_of(load(SFT, *overrides.split())))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("algorithm.loss=nll", "`algorithm.name: grpo` trains on rollouts"),
        ("algorithm.advantage=none", "rewards would not count"),
        ("data.completion_key=reply", "`data.completion_key` has no effect: only `algorithm.name: sft`"),
    ],
)
def test_what_is_for_rows_is_refused_with_rollouts(load, overrides, expected):
    assert any(expected in problem for problem in problems_of(load(overrides)))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("algorithm.name=dpo algorithm.loss=nll", "on answers of rows, and the loss nll is not of pairs of them"),
        ("algorithm.name=sft algorithm.loss=dpo", "trains on answers of rows, and the loss dpo is of pairs of them"),
        ("algorithm.loss=dpo", "`algorithm.name: grpo` trains on rollouts"),
        ("algorithm.name=sft data.chosen_key=good", "`data.chosen_key` has no effect: sft trains on one answer"),
        ("data.rejected_key=bad", "`data.rejected_key` has no effect: only `algorithm.name: dpo`, ipo and simpo"),
        ("algorithm.name=dpo data.completion_key=x", "`data.completion_key` has no effect: a row is a pair of answers"),
        ("algorithm.name=simpo reference.path=x", "`reference.path` has no effect: the loss simpo compares with no"),
        ("algorithm.name=sft reference.path=x", "`reference.path` has no effect: the loss nll compares with no"),
        ("algorithm.name=simpo algorithm.loss.label_smoothing=0.1", "is not an option of the loss simpo"),
        ("algorithm.name=dpo algorithm.loss.label_smoothing=0.5", "should be a number, at least 0 and below 0.5"),
        ("algorithm.name=dpo algorithm.aggregation=token_mean", "the loss dpo is always seq_mean_token_mean"),
        ("algorithm.name=dpo batch.updates_per_step=9", "`batch.updates_per_step: 9` is more than a step's 8 pairs"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(load, overrides, expected):
    with pytest.raises(RecipeError) as caught:
        check(load(*overrides.split()))
    assert any(expected in problem for problem in caught.value.problems)


def test_a_reference_of_its_own_goes_with_dpo(load):
    assert check(load("algorithm.name=dpo", "reference.path=x", "algorithm.loss.beta=0.5")) == []


def test_with_a_reward_rows_are_validated_by_generation(load):
    recipe = load(SFT, VALIDATED, "environment.reward.name=exact", "rollout.max_response_tokens=64")
    assert check(recipe) == []
    assert recipe.needs_engine
    assert not load(SFT, VALIDATED).needs_engine


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["algorithm.mask_mean_reward=[0.9, 0.1]"], "has no mean in it: the lower bound comes first"),
        (["algorithm.mask_mean_reward=[0.1, 0.9]", "batch.samples_per_prompt=1"], "a prompt has one sample"),
    ],
)
def test_a_mask_by_mean_rewards_has_means_that_it_leaves(load, overrides, reason):
    assert any("`algorithm.mask_mean_reward" in one and reason in one for one in problems_of(load(*overrides)))
