"""What is put together before a job is sent: the recipe as another folder must have it, the code, the variables."""

from collections.abc import Callable
from pathlib import Path

import pytest
from runs import RECIPE

from corral.cluster.jobs import job_code
from corral.cluster.jobs.job import Job, describe_saved
from corral.cluster.jobs.job_code import JobCode, collect_code, files_of, with_absolute_paths
from corral.cluster.jobs.submit import JobRequest, chosen_variables, new_id, prepare, read_runtime_env
from corral.recipe.errors import RecipeError, UserError
from corral.recipe.load import dump_recipe, load_recipe
from corral.recipe.rules import check
from corral.recipe.schema import Recipe

Load = Callable[..., Recipe]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """From which things are submitted."""
    made = tmp_path / "project"
    made.mkdir()
    return made


@pytest.fixture
def load(folder: Path) -> Load:
    """A recipe of that folder, with changes."""

    def with_changes(*overrides: str) -> Recipe:
        path = folder / "recipe.yaml"
        path.write_text(RECIPE.format(folder=folder, model="models/mine"))
        return load_recipe(path, ["environment.reward.name=exact", *overrides])

    return with_changes


def write(folder: Path, *names: str, content: str = "x = 1\n") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


# --- the recipe

OTHER_PYTHON = "rollout.engine={name: vllm, python: envs/vllm/bin/python}"


def test_paths_are_those_of_the_folder_it_was_submitted_from(folder: Path, load: Load) -> None:
    (folder / "models" / "mine").mkdir(parents=True)
    files = ("data.train.path=[a.jsonl, 'b/*.parquet']", "~data.train.size", "~data.train.options")
    recipe = with_absolute_paths(
        load(*files, "logging.runs=runs", "checkpoint.resume=old/step_1", "reference.path=../other", OTHER_PYTHON),
        folder,
    )
    assert recipe.rollout.engine.python == f"{folder}/envs/vllm/bin/python"
    assert recipe.model.path == f"{folder}/models/mine"
    assert recipe.data.train.path == [f"{folder}/a.jsonl", f"{folder}/b/*.parquet"]
    assert recipe.logging.runs == f"{folder}/runs"
    assert recipe.checkpoint.resume == f"{folder}/old/step_1"
    assert recipe.reference.path == f"{folder}/../other"


def test_a_run_folder_in_the_home_directory_stays_in_that_of_the_job(folder: Path, load: Load) -> None:
    assert with_absolute_paths(load("logging.runs=~/runs"), folder).logging.runs == "~/runs"


def test_paths_of_several_sources_and_environments_are_too(folder: Path, load: Load) -> None:
    (folder / "own.py").write_text("def rows(): ...\nclass Game: ...\n")
    written = ("~data.train", "data.train.sources={a: {path: a.jsonl}, b: {path: 'own.py:rows'}}", "~environment")
    recipe = load(*written, "environments={x: {name: 'own.py:Game'}}")
    prepared, _ = collect_code(with_absolute_paths(recipe, folder), folder, None)
    assert prepared.data.train.sources["a"].path == f"{folder}/a.jsonl"
    assert prepared.data.train.sources["b"].path == f"{folder}/own.py:rows"
    assert prepared.environments["x"].name == f"{folder}/own.py:Game"


def test_paths_of_services_and_of_the_prometheus_token_are_too(folder: Path, load: Load) -> None:
    services = "cluster.services={wiki: {retriever: index, corpus: wiki.jsonl, port: 8000}}"
    recipe = with_absolute_paths(load(services, "logging.prometheus={token_file: token}"), folder)
    wiki = recipe.cluster.services["wiki"]
    assert (wiki.retriever, wiki.corpus) == (f"{folder}/index", f"{folder}/wiki.jsonl")
    assert recipe.logging.prometheus is not None
    assert recipe.logging.prometheus.token_file == f"{folder}/token"


def test_boards_are_no_path(folder: Path, load: Load) -> None:
    recipe = load("data.train.path=boards", "~data.train.options")
    assert with_absolute_paths(recipe, folder).data.train.path == "boards"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.path=org/name", "org/name"),
        ("model.path=smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("model.path=~/models/mine", "~/models/mine"),
        ("model.path=/models/mine", "/models/mine"),
    ],
)
def test_what_is_no_path_in_the_folder_stays(folder: Path, load: Load, override: str, expected: str) -> None:
    recipe = with_absolute_paths(load(override), folder)
    assert recipe.model.path == expected
    assert recipe.data.train.path == "arithmetic:addition"
    assert recipe.checkpoint.resume == "auto"


def test_keys_that_were_not_written_are_still_not(folder: Path, load: Load) -> None:
    """A recipe with a `cluster` section would run elsewhere."""
    before = load("~logging")
    after = prepare(JobRequest(before, folder, folder)).recipe
    assert after.model_fields_set - before.model_fields_set == {"logging"}
    assert "cluster" not in dump_recipe(after)


def test_a_chat_template_travels_in_the_recipe(folder: Path, load: Load) -> None:
    write(folder, "chat.jinja", content="{{ messages }}")
    assert with_absolute_paths(load("model.chat_template=chat.jinja"), folder).model.chat_template == "{{ messages }}"
    assert with_absolute_paths(load("model.chat_template=other.jinja"), folder).model.chat_template == "other.jinja"


# --- the code


def test_python_files_and_small_texts_are_sent(folder: Path) -> None:
    write(folder, "a.py", "package/b.py", "prompts/hello.txt", "template.jinja")
    left_out = ("data.jsonl", "secrets.yaml", "key.json", "model.safetensors", ".hidden.py", ".git/hook.py")
    write(
        folder,
        *left_out,
        "venv/lib/c.py",
        "own/pyvenv.cfg",
        "own/lib/d.py",
        "runs/e.py",
        "__pycache__/f.py",
        "a_run/metrics.jsonl",
        "a_run/g.py",
    )
    write(folder, "large.txt", content="x" * (job_code.MAX_TEXT_BYTES + 1))
    assert sorted(files_of(folder, skip=folder / "runs")) == [
        "a.py",
        "package/b.py",
        "prompts/hello.txt",
        "template.jinja",
    ]


def test_other_files_are_sent_if_they_are_named(folder: Path, load: Load) -> None:
    write(folder, "a.py", "prompts/one.json", "prompts/two.json", "three.json")
    _, code = collect_code(load(), folder, folder, ["prompts/*.json"])
    assert sorted(code.files) == ["a.py", "prompts/one.json", "prompts/two.json"]
    with pytest.raises(UserError, match=r"--include \*\.csv: no file"):
        collect_code(load(), folder, folder, ["*.csv"])


@pytest.mark.parametrize("written", ["score.py", "./score.py", "{folder}/score.py"])
def test_a_file_of_the_folder_is_named_within_it(folder: Path, load: Load, written: str) -> None:
    write(folder, "score.py")
    name = f"{written.format(folder=folder)}:score"
    recipe, code = collect_code(load(f"environment.reward.name={name}"), folder, folder)
    assert recipe.environment.reward.name == "score.py:score"
    assert list(code.files) == ["score.py"]


def test_a_file_from_elsewhere_comes_with_those_beside_it(tmp_path: Path, folder: Path, load: Load) -> None:
    write(tmp_path / "elsewhere", "score.py", "helper.py", "data.jsonl", "deeper/more.py")
    recipe, code = collect_code(load("environment.reward.name=../elsewhere/score.py:score"), folder, folder)
    assert recipe.environment.reward.name == ".corral/code/0/score.py:score"
    assert sorted(code.files) == [".corral/code/0/helper.py", ".corral/code/0/score.py"]


def test_losses_and_advantages_of_the_users_are_sent_and_named_as_rewards_are(folder: Path, load: Load) -> None:
    (folder / "own.py").write_text("def loss(terms): ...\ndef advantage(batch): ...\n")
    loss, advantage = (f"algorithm.{kind}={folder}/own.py:{kind}" for kind in ("loss", "advantage"))
    recipe, code = collect_code(load(loss, advantage), folder, folder)
    assert (recipe.algorithm.loss.name, recipe.algorithm.advantage.name) == ("own.py:loss", "own.py:advantage")
    assert list(code.files) == ["own.py"]


def test_a_file_that_is_not_there_is_said_before_anything_is_sent(folder: Path, load: Load) -> None:
    write(folder, "score.py")
    with pytest.raises(UserError, match=r"environment\.reward\.name: no file .*scorr\.py; did you mean `score\.py`\?"):
        collect_code(load("environment.reward.name=scorr.py:score"), folder, folder)


def test_a_module_on_the_path_comes_along_and_an_installed_one_does_not(
    tmp_path: Path, folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "library", "mine/__init__.py", "mine/score.py", "single.py", "other.py")
    monkeypatch.syspath_prepend(str(tmp_path / "library"))

    def sent_with(name: str) -> JobCode:
        return collect_code(load(f"environment.reward.name={name}"), folder, folder)[1]

    assert sorted(sent_with("mine.score:score").files) == ["mine/__init__.py", "mine/score.py"]
    assert sorted(sent_with("single:score").files) == ["single.py"]
    assert sent_with("yaml:load").files == {}
    assert sent_with("json:loads").files == {}
    assert sent_with("json:loads").missing == []
    assert sent_with("nowhere.at_all:score").missing == ["nowhere"]


def test_without_code_files_are_named_in_full(folder: Path, load: Load) -> None:
    write(folder, "score.py")
    recipe, code = collect_code(load("environment.reward.name=score.py:score"), folder, None)
    assert recipe.environment.reward.name == f"{folder}/score.py:score"
    assert code.files == {}


def test_code_that_is_too_large_is_refused_with_its_largest_files(
    folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_code, "MAX_BYTES", 3000)
    write(folder, "small.py")
    write(folder, "tables/large.py", content="x" * 4000)
    with pytest.raises(
        UserError, match=r"2 files of code are 3\.91 KiB.* at most .* 2\.93 KiB.*tables/large\.py \(3\.91 KiB\)"
    ):
        collect_code(load(), folder, folder)


def test_a_home_directory_is_not_sent(folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    with pytest.raises(UserError, match="would be sent along: submit from the folder of your code"):
        collect_code(load(), folder, folder)


# --- the variables


def test_only_chosen_variables_travel() -> None:
    own = {"HF_TOKEN": "a", "PATH": "b", "WANDB_API_KEY": "c"}
    found, unset = chosen_variables(["HF_TOKEN", "HF_HOME"], ["WANDB_API_KEY", "MODE=x=y", "HF_TOKEN=other"], own)
    assert found == {"HF_TOKEN": "other", "WANDB_API_KEY": "c", "MODE": "x=y"}
    assert unset == ["HF_HOME"]


def test_a_variable_that_is_not_set_here_is_an_error_if_it_was_asked_for() -> None:
    with pytest.raises(UserError, match="--env HF_TOKEN: it is not set here"):
        chosen_variables([], ["HF_TOKEN"], {})
    with pytest.raises(UserError, match="not the name of a variable"):
        chosen_variables([], ["a b=c"], {})
    with pytest.raises(UserError, match="--env CUDA_VISIBLE_DEVICES: Ray sets it itself"):
        chosen_variables([], ["CUDA_VISIBLE_DEVICES=0"], {})


def test_workers_get_the_variables_of_the_command_too(folder: Path, load: Load) -> None:
    recipe = load("cluster.nodes=2", "cluster.environment=[HF_TOKEN]")
    package = prepare(JobRequest(recipe, folder, folder, variables={"HF_TOKEN": "a", "MODE": "b"}))
    assert package.recipe.cluster.environment == ["HF_TOKEN", "MODE"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("HF_TOKEN=abc", "`cluster.environment: HF_TOKEN` should be the name of a variable alone"),
        ("CUDA_VISIBLE_DEVICES", "Ray sets it for each of them"),
        ("RAY_ADDRESS", "Ray sets it for each of them"),
    ],
)
def test_a_recipe_names_variables_and_not_values(load: Load, name: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem) as caught:
        check(load(f"cluster.environment=['{name}']"))
    assert "abc" not in str(caught.value)


def test_a_runtime_env_is_taken_apart(tmp_path: Path) -> None:
    file = tmp_path / "env.yaml"
    file.write_text("pip: [math-verify]\nenv_vars: {HF_TOKEN: secret, LEVEL: 3, RAY_DEBUG: 1}\nworking_dir: src\n")
    for_ray, variables, code = read_runtime_env(file)
    assert for_ray == {"pip": ["math-verify"], "env_vars": {"RAY_DEBUG": "1"}}
    assert variables == {"HF_TOKEN": "secret", "LEVEL": "3"}
    assert code == tmp_path / "src"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pipp: [x]", "`pipp` is not a key of a runtime_env; did you mean `pip`?"),
        ("working_dir: s3://bucket/code.zip", "`working_dir` must be a folder here"),
        ("env_vars: [HF_TOKEN]", "`env_vars` must be a mapping"),
        ("[pip]", "it must be a mapping"),
        ("pip: [", "it is not valid YAML"),
    ],
)
def test_a_runtime_env_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "env.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"--runtime-env {file}: "):
        read_runtime_env(file)
    with pytest.raises(UserError) as caught:
        read_runtime_env(file)
    assert problem in str(caught.value)


# --- the job


def test_ids_tell_the_run_and_the_time_and_are_never_the_same() -> None:
    first = new_id("Käse & Brot", [])
    assert first.startswith("K-se-Brot-20")
    ended = Job(first, "failed", None, None, None, True, 1, "", None, None)
    assert new_id("Käse & Brot", [ended]) != first


@pytest.mark.parametrize(
    ("folder", "output", "expected"),
    [
        (None, "step 7/9", "its output does not say what it saved; look into its run's folder"),
        (None, "(stopped after step 7 of 9)", "a checkpoint of step 7 of 9 is in its run's folder"),
        ("runs/a", "(stopped after step 7 of 9)", "a checkpoint of step 7 of 9 is in runs/a"),
        ("runs/a", "loading the model", "it was not in the middle of training, and saved nothing"),
    ],
)
def test_what_a_job_saved_is_not_denied_where_it_is_not_known(folder: str | None, output: str, expected: str) -> None:
    """Ray kills a job that Corral did not submit before its run can say so."""
    assert describe_saved(Job("a", "stopped", None, None, folder, True, None, "", None, None), output).startswith(
        expected
    )


def test_resuming_and_naming_another_checkpoint_is_a_contradiction(folder: Path, load: Load) -> None:
    with pytest.raises(UserError, match="--resume goes on with the run of that name"):
        prepare(JobRequest(load("checkpoint.resume=other/step_1"), folder, folder, resume=True))
    assert (
        prepare(JobRequest(load("checkpoint.resume=never"), folder, folder, resume=True)).recipe.checkpoint.resume
        == "auto"
    )


def test_the_recipe_arrives_as_it_was_meant(folder: Path, load: Load, tmp_path: Path) -> None:
    package = prepare(JobRequest(load("cluster.address=10.0.0.1:6379"), folder, folder))
    assert "`cluster.address: 10.0.0.1:6379` is not used" in package.notes[0]
    (tmp_path / "sent.yaml").write_text(dump_recipe(package.recipe))
    assert load_recipe(tmp_path / "sent.yaml") == package.recipe
