"""YAML of other systems: files that name files, changes, references."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from corral.migrate.config import RawConfig, add_file, add_override, read_value
from corral.migrate.config_sources import migrate_file, migrate_words
from corral.recipe.errors import RecipeError
from corral.recipe.schema import Service


def flat(config: RawConfig) -> dict[str, Any]:
    return {key: given.value for key, given in config.flat().items()}


def read(tmp_path: Path, text: str, *overrides: str) -> RawConfig:
    file = tmp_path / "main.yaml"
    file.write_text(text)
    config = RawConfig()
    add_file(config, file)
    for override in overrides:
        add_override(config, override, "command")
    return config


def problems(config: RawConfig) -> list[str]:
    config.flat()
    return config.problems


def test_dotted_keys_are_nested_ones(tmp_path: Path) -> None:
    assert flat(read(tmp_path, "a.b: 1\na:\n  c: [1, 2]\n")) == {"a.b": 1, "a.c": [1, 2]}


def test_every_key_has_its_line(tmp_path: Path) -> None:
    given = read(tmp_path, "a:\n  b: 1\nc: 2\n", "a.d=3").flat()
    assert given["a.b"].where == f"{tmp_path}/main.yaml:2"
    assert given["a.d"].where == "command"


def test_settings_of_hydra_itself_need_no_variables(tmp_path: Path) -> None:
    config = read(tmp_path, "hydra:\n  searchpath: ['file://${oc.env:REPO_PATH}/config']\na: ${oc.env:HERE}\n")
    assert flat(config) == {"hydra.searchpath": ["file://${oc.env:REPO_PATH}/config"]}
    assert [line.partition("`")[2][:1] for line in config.problems] == ["a"]


def test_overrides_as_hydra_reads_them() -> None:
    config = RawConfig()
    for word in ("a.b=1e-6", "+a.c=true", "++d=[x,y]", "e={f: 1}", "g=null", "h=a: b", "i=", "j='1'", "k=x=y"):
        add_override(config, word, "command")
    assert flat(config) == {
        "a.b": 1e-6,
        "a.c": True,
        "d": ["x", "y"],
        "e.f": 1,
        "g": None,
        "h": "a: b",
        "i": "",
        "j": "1",
        "k": "x=y",
    }


def test_a_tilde_takes_a_key_away(tmp_path: Path) -> None:
    assert flat(read(tmp_path, "a: {b: 1, c: 2}\n", "~a.b")) == {"a.c": 2}


@pytest.mark.parametrize("word", ["data", "=1", "data.x", "--flag", "a b=1", "data.x=[1,2", "a..b=1", "x@y=z"])
def test_a_malformed_override_is_one_clear_error(word: str) -> None:
    config = RawConfig()
    add_override(config, word, "command")
    [problem] = problems(config)
    assert problem.startswith(f"command: `{word}`")


def test_files_that_defaults_name_lie_under_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("path: tiny\nlayers: 2\n")
    (tmp_path / "base.yaml").write_text("steps: 5\nseed: 1\n")
    defaults = ("base", "model/small@actor.model", "_self_", "override hydra/job_logging: stdout")
    text = "defaults:\n" + "".join(f"  - {name}\n" for name in defaults) + "seed: 2\n"
    assert flat(read(tmp_path, text)) == {"steps": 5, "seed": 2, "actor.model.path": "tiny", "actor.model.layers": 2}


def test_files_that_are_not_there_are_remembered(tmp_path: Path) -> None:
    config = read(tmp_path, "defaults:\n  - ../config/traj_envs@_here_\n  - training: fsdp\nzero: ${deepspeed_zero2}\n")
    assert config.missing == ["../config/traj_envs", "training/fsdp"]
    assert flat(config) == {"zero": None}


def test_files_in_a_circle_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("defaults: [main]\n")
    with pytest.raises(RecipeError, match="name each other in a circle"):
        read(tmp_path, "defaults: [other]\n")


def test_references(tmp_path: Path) -> None:
    text = """\
n: 4
text: run-${n}
same: ${n}
section:
  x: 1
  y: ${.x}
  z: ${..n}
copy: ${section}
half: ${int_div:${n},2}
unset: ${oc.env:HOME,/nowhere}
other: ${oc.select:nothing,7}
on: true
off: ${not:${on}}
off_too: ${not:on}
"""
    values = flat(read(tmp_path, text))
    assert values["text"] == "run-4"
    assert values["same"] == 4
    assert (values["section.y"], values["section.z"], values["copy.x"]) == (1, 4, 1)
    assert (values["off"], values["off_too"]) == (False, False)
    assert (values["half"], values["unset"], values["other"]) == (2, "/nowhere", 7)


def test_an_anchor_in_a_circle_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="contains an alias to itself"):
        read(tmp_path, "a: &x\n  b: *x\n")


@pytest.mark.parametrize(
    "value", ["${eval:'1+1'}", "${python:os.system}", "${oc.env:WHO}", "${divide:1,0}", "${multiply:1e308,1e308}"]
)
def test_resolvers_run_nothing(tmp_path: Path, value: str) -> None:
    assert len(problems(read(tmp_path, f'a: "{value}"\n'))) == 1


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["a0: xxxxxxxxxx", *(f'a{n}: "${{a{n - 1}}}${{a{n - 1}}}"' for n in range(1, 40))], "too many references"),
        (["a0: 1", *(f"a{n}: ${{a{n - 1}}}" for n in range(1, 1000))][::-1], "too deeply"),
        (["a: ${nothing.here}"], "refers to a key that is not there"),
        (["a: ${b}", "b: ${c}", "c: ${a}"], "`a` values refer to each other in a circle: a -> b -> c -> a"),
    ],
    ids=["a bomb", "a long chain", "to nothing", "a circle"],
)
def test_references_that_cannot_be_followed_are_one_clear_error(tmp_path: Path, lines: list[str], problem: str) -> None:
    assert problem in "".join(problems(read(tmp_path, "\n".join(lines))))


def test_a_bomb_of_aliases_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    with pytest.raises(RecipeError, match="aliases make more than"):
        read(tmp_path, "\n".join(lines))


def test_a_bomb_of_files_is_refused(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"a{number}.yaml").write_text(f"defaults: [a{number + 1}, a{number + 1}]\n")
    with pytest.raises(RecipeError, match="more than 100 files"):
        read(tmp_path, "defaults: [a0]\n")


def test_files_elsewhere_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "configs" / "mine"
    folder.mkdir(parents=True)
    (tmp_path / "secrets.yaml").write_text("token: 1\n")
    config = read(folder, f"defaults: [../../secrets, {tmp_path}/secrets]\na: 1\n")
    assert flat(config) == {"a": 1}
    assert config.missing == ["../../secrets", f"{tmp_path}/secrets"]


def test_a_group_lies_below_its_name_unless_it_says_where(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small.yaml").write_text("layers: 2\n")
    (tmp_path / "model" / "large.yaml").write_text("# @package _global_\nlayers: 8\n")
    assert flat(read(tmp_path, "defaults:\n  - model: small\n")) == {"model.layers": 2}
    assert flat(read(tmp_path, "defaults:\n  - model@_global_: small\n")) == {"layers": 2}
    assert flat(read(tmp_path, "defaults:\n  - model: large\n")) == {"layers": 8}
    assert flat(read(tmp_path, "defaults:\n  - model: large\n  - override model: small\n")) == {"model.layers": 2}


def test_a_file_is_under_those_that_come_behind_self(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 1\n")
    assert flat(read(tmp_path, "defaults: [_self_, base]\nseed: 2\n")) == {"seed": 1}
    assert flat(read(tmp_path, "defaults: [base, _self_]\nseed: 2\n")) == {"seed": 2}


def test_words_for_true_and_false(tmp_path: Path) -> None:
    assert flat(read(tmp_path, "a: no\nb: On\nc: 'no'\n")) == {"a": False, "b": True, "c": "no"}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("{a:eager,b:0}", {"a": "eager", "b": 0}),
        ("{a: [1,'x y'], b: {c: null}}", {"a": [1, "x y"], "b": {"c": None}}),
        ("[${a.b},1]", ["${a.b}", 1]),
        ("[]", []),
        ("a\\,b", "a,b"),
        ("x #y", "x #y"),
        ("&x", "&x"),
        ("a: b", "a: b"),
        ("'it\\'s'", "it's"),
        ("http://x:1/y", "http://x:1/y"),
    ],
)
def test_values_are_read_as_hydra_reads_them(written: str, value: Any) -> None:
    assert read_value(written) == value


@pytest.mark.parametrize("written", ["[1,2", "{a:1", "[1]x", "{a}", "'a", "[" * 100 + "]" * 100])
def test_values_that_are_left_open_are_refused(written: str) -> None:
    with pytest.raises(RecipeError):
        read_value(written)


# --- other kinds of run, and scripts that leave something open


def script(folder: Path, text: str) -> Path:
    (folder / "run.sh").write_text(text)
    return folder / "run.sh"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("torchrun examples/sft/train_vlm_sft.py model.path=x", "supervised fine-tuning"),
        ("python3 -m verl.trainer.main_generation_server model.path=x", "rollouts without training"),
        ("python3 -m verl.trainer.main_eval data.path=x", "an evaluation"),
        ("python3 -m recipe.prime.main_prime data.train_files=x", "code of its own"),
        ("python3 -m recipe.partial_rollout.main_ppo data.train_files=x", "code of its own"),
        ("python examples/start_distill_vl_pipeline.py --config_name x", "distillation"),
        ("python examples/start_agentic_rollout_pipeline.py --config_name x", "rollouts without training"),
        ("python examples/embodiment/train_embodied_agent.py --config-name x", "embodied"),
    ],
)
def test_other_kinds_of_run_are_refused_in_one_line_that_says_which(text: str, kind: str, tmp_path: Path) -> None:
    path = script(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        migrate_file(path)
    [line] = caught.value.problems
    assert kind in line
    assert line.endswith("which is not migrated")


@pytest.mark.parametrize(
    ("system", "word"),
    [
        ("roll", "student.data_args.file_name=x"),
        ("roll", "teacher.large.model_args.model_name_or_path=x"),
        ("rlinf", "runner.task_type=embodied"),
        ("rlinf", "runner.task_type=sft"),
        ("rlinf", "runner.only_eval=true"),
    ],
)
def test_keys_of_another_kind_of_run_are_refused(system: str, word: str) -> None:
    with pytest.raises(RecipeError, match="which is not migrated"):
        migrate_words([word], system)


def test_dapo_of_the_recipes_is_no_other_kind() -> None:
    words = ["python3", "-m", "recipe.dapo.main_dapo", "data.train_files=x", "actor_rollout_ref.model.path=m"]
    assert migrate_words(words).recipe.model.path == "m"


@pytest.mark.parametrize(
    ("system", "word"),
    [
        ("verl", "critic.megatron.pipeline_model_parallel_size=2"),
        ("verl", "actor_rollout_ref.actor.fsdp_config.qat.enable=true"),
        ("verl", "actor_rollout_ref.actor.megatron.override_transformer_config.fp8=hybrid"),
        ("verl", "actor_rollout_ref.actor.megatron.router_replay.mode=R3"),
        ("roll", "actor_train.strategy_args.strategy_config.fp8=hybrid"),
        ("rlinf", "actor.model.fp8=hybrid"),
    ],
)
def test_no_row_for_a_whole_section_hides_a_feature(system: str, word: str) -> None:
    needed = {
        "roll": [f"{role}.device_mapping=[0,1]" for role in ("actor_train", "actor_infer", "reference")],
        "rlinf": [],
    }
    verl = ["data.train_files=x", "actor_rollout_ref.model.path=m"]
    migration = migrate_words([*needed.get(system, verl), word], system)
    assert [str(entry.given) for entry in migration.unsupported] == [word]


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("verl", ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2", "trainer.n_gpus_per_node=4"]),
        ("verl", ["actor_rollout_ref.actor.engine.pp=2", "trainer.n_gpus_per_node=4"]),
        ("roll", ["actor_train.strategy_args.strategy_config.pipeline_model_parallel_size=2"]),
        ("rlinf", ["actor.model.pipeline_model_parallel_size=2", "cluster.num_nodes=1", "cluster.num_gpus_per_node=4"]),
        ("search_r1", ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2"]),
    ],
)
def test_pipeline_stages_are_those_of_the_trainers(system: str, words: list[str]) -> None:
    roles = [f"{role}.device_mapping=[0,1,2,3]" for role in ("actor_train", "actor_infer", "reference")]
    needed = {"roll": roles, "rlinf": []}.get(system, ["data.train_files=x", "actor_rollout_ref.model.path=m"])
    migration = migrate_words([*needed, *words], system)
    assert migration.recipe.train.parallel.pipeline == 2
    assert not migration.unsupported


def test_the_reference_has_the_stages_of_the_actor() -> None:
    words = ["data.train_files=x", "actor_rollout_ref.model.path=m", "trainer.n_gpus_per_node=4"]
    words += [f"actor_rollout_ref.{role}.megatron.pipeline_model_parallel_size=2" for role in ("actor", "ref")]
    words += ["critic.megatron.pipeline_model_parallel_size=4"]
    assert [one.given.key.partition(".")[0] for one in migrate_words(words, "verl").unsupported] == ["critic"]


PPO = "python3 -m verl.trainer.main_ppo data.train_files=x actor_rollout_ref.model.path=m"


def test_a_number_that_an_open_branch_decides_is_an_error_with_both_values(tmp_path: Path) -> None:
    path = script(tmp_path, f"if [ -d /big ]; then N=8; else N=4; fi\n{PPO} trainer.n_gpus_per_node=$N")
    with pytest.raises(RecipeError, match=r"`cluster.devices_per_node` is 8 or 4: .*run.sh:1: `\[ -d /big \]` decides"):
        migrate_file(path)
    assert migrate_file(path, defined={"N": "2"}).recipe.cluster.devices_per_node == 2


def test_a_path_that_an_open_branch_decides_is_a_remark(tmp_path: Path) -> None:
    path = script(tmp_path, f"if [ -d /big ]; then M=/big; else M=/small; fi\n{PPO} actor_rollout_ref.model.path=$M")
    migration = migrate_file(path)
    assert migration.recipe.model.path == "/big"
    assert any("`model.path` is /big or /small" in pitfall for pitfall in migration.pitfalls)


def test_a_branch_on_which_nothing_depends_is_no_remark(tmp_path: Path) -> None:
    path = script(tmp_path, f"if ! ray status; then ray start --head; fi\n[ -d out ] || mkdir out\n{PPO}")
    assert not migrate_file(path).pitfalls


def test_what_other_keys_refer_to_need_not_be_a_key(tmp_path: Path) -> None:
    path = tmp_path / "main.yaml"
    path.write_text(
        "my_names: {rate: 1e-6, other: 2}\nactor_train: {training_args: {learning_rate: '${my_names.rate}'}}"
    )
    migration = migrate_file(path, "roll")
    assert migration.recipe.optimizer.learning_rate == 1e-6
    assert [one.given.key for one in migration.entries if one.outcome.status == "no effect"] == [
        "my_names.rate",
        "my_names.other",
    ]
    path.write_text("exp_nme: x\nexp_name: y")
    with pytest.raises(RecipeError, match="`exp_nme=x` is not a key of ROLL"):
        migrate_file(path, "roll")


RETRIEVAL = """\
file_path=/data/wiki
python search_r1/search/retrieval_server.py --index_path $file_path/e5_Flat.index \\
  --corpus_path $file_path/wiki-18.jsonl --topk 5 {options} --faiss_gpu
"""


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (
            "--retriever_name e5 --retriever_model intfloat/e5-base-v2",
            " --kind flat --encoder intfloat/e5-base-v2 --half",
        ),
        ("--retriever_name bm25", ""),
    ],
)
def test_the_script_of_a_retriever_says_what_stands_for_it(tmp_path: Path, options: str, kind: str) -> None:
    (script := tmp_path / "retrieval_launch.sh").write_text(RETRIEVAL.format(options=options))
    with pytest.raises(RecipeError, match="which is not migrated") as refused:
        migrate_file(script)
    build, service, serve, _ = re.findall("`(.*?)`", f"{refused.value}``")
    assert build == f"corral retriever build /data/wiki/wiki-18.jsonl /data/wiki/index{kind}"
    assert serve == "corral retriever serve /data/wiki/index --topk 5"
    key, _, services = service.partition(": ")
    assert key == "cluster.services"
    written = yaml.safe_load(services)["retriever"]
    assert Service.model_validate(written).retriever == "/data/wiki/index"


@pytest.mark.parametrize(
    ("before", "is_there"),
    [
        ("export VERL_USE_MODELSCOPE=True\n", True),
        ("VERL_USE_MODELSCOPE=1 ", True),
        ("# VERL_USE_MODELSCOPE=1\n", False),
    ],
)
def test_a_script_that_takes_models_from_modelscope_says_how_to(tmp_path: Path, before: str, is_there: bool) -> None:
    path = script(tmp_path, before + PPO)
    said = f"{path}:1: the model comes from ModelScope: write `model.path: ms:OWNER/NAME`"
    assert (said in migrate_file(path).pitfalls) == is_there


DISTILLATION = [
    *PPO.split(),
    "algorithm.adv_estimator=grpo",
    "distillation.enabled=True",
    "distillation.teacher_models.teacher_model.model_path=big",
    "distillation.distillation_loss.use_task_rewards=False",
]


def test_one_teacher_whose_log_probs_are_advantages_is_distill() -> None:
    loss = ("distillation.distillation_loss.loss_mode=k1", "distillation.distillation_loss.use_policy_gradient=True")
    recipe = migrate_words([*DISTILLATION, *loss]).recipe
    assert (recipe.algorithm.name, recipe.reference.path, recipe.batch.samples_per_prompt) == ("distill", "big", 1)
    with pytest.raises(RecipeError, match="is distillation of 2 teachers, which is not migrated"):
        migrate_words([*DISTILLATION, *loss, "+distillation.teacher_models.other.model_path=small"])
    with pytest.raises(RecipeError, match="is distillation by its own loss, which is not migrated"):
        migrate_words(DISTILLATION)


@pytest.mark.parametrize("program", ["sft_trainer", "sft_trainer_ray", "fsdp_sft_trainer"])
def test_supervised_fine_tuning_of_verl_has_the_devices_of_torchrun(program: str) -> None:
    words = f"torchrun --nnodes=2 --nproc-per-node 4 -m verl.trainer.{program} data.train_files=x.parquet"
    recipe = migrate_words(
        [*words.split(), "model.partial_pretrain=m", "data.prompt_key=q", "data.prompt_dict_keys=[a]"]
    ).recipe
    assert (recipe.algorithm.name, recipe.cluster.nodes, recipe.cluster.devices_per_node) == ("sft", 2, 4)
    assert (recipe.model.path, recipe.data.prompt_key) == ("m", "q.a")
