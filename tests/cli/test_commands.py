"""The verbs, as a user calls them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import typer.main
from commands import corral
from runs import VALIDATION, rows_of, write_recipe

from corral.cli.main import app
from corral.observe.run_files import read_metrics

SAMPLED = (*VALIDATION, "validation.temperature=1.0", "validation.samples_per_prompt=2")


@pytest.mark.slow
def test_the_installed_command_trains_without_a_word_on_stderr(tmp_path: Path, tiny_model: Path) -> None:
    """Not forked from a warm process: all imports in their real order."""
    write_recipe(tmp_path, tiny_model)
    command = [sys.executable, "-m", "corral.cli.main", "train", "recipe.yaml", *VALIDATION]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0
    assert finished.stderr == ""
    assert "validation after training" in finished.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with a recipe and its finished run."""
    folder = tmp_path_factory.mktemp("trained")
    write_recipe(folder, tiny_model)
    finished = corral(folder, "train", "recipe.yaml", "schedule.steps=4", *SAMPLED)
    assert finished.code == 0, finished.stderr
    return folder


def test_plan_says_what_would_happen_and_makes_nothing(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    before = set(tmp_path.iterdir())
    finished = corral(tmp_path, "plan", "recipe.yaml", "batch.updates_per_step=2")
    assert finished.code == 0
    assert "4 prompts x 4 samples = 16 trajectories -> 2 updates of 8 on 1 trainer" in finished.stdout
    assert "actor+rollout" in finished.stdout
    assert {path for path in set(tmp_path.iterdir()) - before if "std" not in path.name} == set()


def test_plan_for_programs(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    finished = corral(tmp_path, "plan", "recipe.yaml", "--json")
    plan = json.loads(finished.stdout)
    assert plan["batch"]["trajectories"] == 16
    assert plan["schedule"]["steps"] == 2
    assert plan["placement"]["actor"] == [0]


def test_the_plan_in_the_run_folder_is_the_one_of_plan(trained: Path) -> None:
    printed = corral(trained, "plan", "recipe.yaml", "schedule.steps=4", *SAMPLED).stdout
    assert (trained / "runs" / "tiny" / "plan.txt").read_text().strip() == printed.strip()


def scores(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("validation/")}


def test_evaluate_scores_the_recipes_model_as_the_run_did(trained: Path) -> None:
    before, *_ = rows_of(trained / "runs" / "tiny")
    finished = corral(trained, "evaluate", "recipe.yaml", "--json", *SAMPLED)
    assert finished.code == 0, finished.stderr
    assert json.loads(finished.stdout) == scores(before)


def test_evaluate_scores_a_checkpoint_as_the_run_did(trained: Path) -> None:
    """With the very command that the run printed."""
    *_, after = rows_of(trained / "runs" / "tiny")
    [line] = [line for line in (trained / "stdout.1").read_text().splitlines() if line.startswith("evaluate ")]
    arguments = line.split()[2:]
    finished = corral(trained, *arguments, "--json")
    assert finished.code == 0, finished.stderr
    assert json.loads(finished.stdout) == scores(after)


def test_evaluate_speaks_to_people(trained: Path) -> None:
    finished = corral(trained, "evaluate", "recipe.yaml", *SAMPLED)
    assert "validation" in finished.stdout
    assert "6 questions" in finished.stdout
    assert finished.stderr == ""


def test_export_writes_a_model_that_evaluates_the_same(trained: Path) -> None:
    *_, after = rows_of(trained / "runs" / "tiny")
    finished = corral(trained, "export", "runs/tiny/checkpoints/step_000004", "out")
    assert finished.code == 0, finished.stderr
    assert finished.stdout == "wrote out\n"
    evaluated = corral(trained, "evaluate", "recipe.yaml", "--json", "--model", "out", *SAMPLED)
    assert json.loads(evaluated.stdout) == scores(after)


def test_data_prepares_a_local_copy_that_a_recipe_can_name(tmp_path: Path, tiny_model: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for split, terms in (("train", (1, 2, 3, 4)), ("test", (5, 6))):
        rows = [{"question": f"{n}+{n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in terms]
        (copy / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    finished = corral(tmp_path, "data", "gsm8k", "--local", "copy", "--out", "prepared")
    assert finished.code == 0, finished.stderr
    assert finished.stdout == "wrote prepared/train.parquet\nwrote prepared/test.parquet\n"
    assert pyarrow.parquet.read_table(tmp_path / "prepared" / "train.parquet").num_rows == 4
    recipe = write_recipe(tmp_path, tiny_model)
    generated = '{path: "arithmetic:addition", size: 40, options: {digits: 1}}'
    files = "{path: prepared/train.parquet}\n  validation: {path: prepared/test.parquet}"
    recipe.write_text(recipe.read_text().replace(generated, files))
    overrides = ("data.max_prompt_tokens=128", "environment.reward.name=gsm8k")
    trained = corral(tmp_path, "train", "recipe.yaml", *overrides)
    assert trained.code == 0, trained.stderr
    assert read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")[0]["validation/mean@1"] == 0


@pytest.mark.parametrize("verb", ["train", "plan", "evaluate", "export", "data", "version"])
def test_help_says_what_a_verb_is_for(tmp_path: Path, verb: str) -> None:
    root: Any = typer.main.get_command(app)
    finished = corral(tmp_path, verb, "--help")
    assert finished.code == 0
    assert " ".join(root.commands[verb].help.split()[:3]) in finished.stdout
    assert verb in corral(tmp_path, "--help").stdout


def test_version(tmp_path: Path) -> None:
    packages = [line.split()[0] for line in corral(tmp_path, "version").stdout.splitlines()]
    assert packages == ["corral", "torch", "transformers"]


def run_and_list_modules(*words: str) -> tuple[str, str]:
    """What a command prints, and which of the large libraries and the schema it has imported."""
    seen = f"import sys; sys.argv = {['corral', *words]}; from corral.cli.main import main\n"
    seen += "try: main()\nexcept SystemExit: pass\n"
    seen += "print([name for name in ('torch', 'transformers', 'ray', 'corral.recipe.schema') if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True).stdout
    printed, _, loaded = output.rstrip().rpartition("\n")
    return printed, loaded


def test_the_version_is_an_option_that_loads_neither_torch_nor_the_schema() -> None:
    version, loaded = run_and_list_modules("--version")
    assert re.fullmatch(r"corral (\d+\.\d+\.\d+\S*|is not installed as a package)", version)
    assert loaded == "[]"


@pytest.mark.slow
def test_neither_a_migration_nor_a_mistake_in_a_recipe_waits_for_torch(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("nonsense: 1")
    golden = Path(__file__).parents[1] / "migrate" / "golden" / "roll_guide_one_device" / "input.yaml"
    assert run_and_list_modules("train", str(tmp_path / "wrong.yaml")) == ("", "['corral.recipe.schema']")
    recipe, loaded = run_and_list_modules("migrate", str(golden))
    assert "prompts_per_step" in recipe
    assert loaded == "['corral.recipe.schema']"


def help_pages(command: Any, words: tuple[str, ...] = ("corral",)) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    return [words, *(page for name, sub in below.items() for page in help_pages(sub, (*words, name)))]


@pytest.mark.parametrize("words", help_pages(typer.main.get_command(app)), ids=" ".join)
def test_every_help_has_examples_that_parse(words: tuple[str, ...]) -> None:
    root: Any = typer.main.get_command(app)
    command = root
    for word in words[1:]:
        command = command.commands[word]
    title, *examples = (command.epilog or "").replace(r"\[", "[").split("\n\n")
    assert title == "Examples:"
    assert examples
    for example in examples:
        typed = shlex.split(re.sub(r"^([A-Z_]+=\S+ )+", "", example).partition(" > ")[0])
        assert tuple(typed[: len(words)]) == words
        parsed, rest = root, typed[1:]
        while hasattr(parsed, "commands"):
            parsed, rest = parsed.commands[rest[0]], rest[1:]
        parsed.make_context(typed[0], rest)


def completed(tmp_path: Path, *words: str) -> list[str]:
    """What the shell is given for the last word: this is how bash asks."""
    environment = {
        **os.environ,
        "_CORRAL_COMPLETE": "complete_bash",
        "COMP_WORDS": shlex.join(["corral", *words]),
        "COMP_CWORD": str(len(words)),
    }
    program = "import sys; sys.argv = ['corral']; from corral.cli.main import main; main()"
    finished = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    return finished.stdout.splitlines()


@pytest.mark.slow
def test_the_shell_completes_keys_of_the_recipe_and_names_to_choose_from(tmp_path: Path) -> None:
    keys = completed(tmp_path, "train", "recipe.yaml", "bat")
    assert "batch.prompts_per_step=" in keys
    assert all(key.startswith("batch.") for key in keys)
    assert completed(tmp_path, "plan", "recipe.yaml", "schedule.steps=3", "optimizer.learning_r") == [
        "optimizer.learning_rate="
    ]
    assert completed(tmp_path, "train", "recipe.yaml", "algorithm.name=gs") == ["algorithm.name=gspo"]
    assert "algorithm.loss=" in completed(tmp_path, "launch", "slurm", "recipe.yaml", "algorithm.l")


def test_a_run_says_that_its_model_takes_the_general_path(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    trained = corral(tmp_path, "train", "recipe.yaml", "schedule.steps=1", "model.implementation=general")
    assert trained.code == 0, trained.stderr
    assert "computed on the general path (`model.implementation: general`)" in trained.stdout
