"""`corral init`: a first recipe, by options or by questions, to be changed afterwards."""

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corral.recipe.errors import UserError

if TYPE_CHECKING:
    from corral.recipe.parts import Preset

DEFAULTS = {"model": "smollm2-135m-instruct", "data": "arithmetic", "algorithm": "grpo"}
QUESTIONS = {
    "model": "Model: a folder, a name on the hub, or smollm2-135m-instruct",
    "data": "Data: arithmetic, gsm8k, or a file with rows (.jsonl, .parquet)",
    "algorithm": "Algorithm: grpo, ppo, dapo, sft, ...",
}


@dataclass(frozen=True)
class StarterTask:
    """Data with the reward that goes with it. `prepare`: the command that makes the files. `keys`: more lines of the
    section `data`, for columns of other names."""

    train: str
    keys: str = ""
    validation: str | None = None
    reward: str = "exact"
    max_prompt_tokens: int = 512
    max_response_tokens: int = 512
    prepare: str | None = None


def arithmetic(options: str) -> StarterTask:
    return StarterTask(
        train=f"{{path: arithmetic:addition, size: 1200, options: {{{options}, part: train}}}}",
        validation=f"{{path: arithmetic:addition, size: 150, options: {{{options}, part: validation}}}}",
        reward="number",
        max_prompt_tokens=64,
        max_response_tokens=32,
    )


TASKS = {
    "arithmetic": arithmetic("min: 10, max: 49"),
    "gsm8k": StarterTask(
        train="{path: data/gsm8k/train.parquet}",
        validation="{path: data/gsm8k/test.parquet, max_rows: 200}",
        reward="gsm8k",
        prepare="corral data gsm8k --out data/gsm8k",
    ),
}
PAIR_TASKS = {"arithmetic": arithmetic("min: 10, max: 49, pairs: true")}
"""Tasks whose rows have two answers, for algorithms that train on pairs."""

RECIPE = """\
# Written by `corral init`, to be changed: docs/recipe.md has every key.
#   corral plan {file}     what would run
#   corral train {file}    runs it; the same command again goes on with a run that was stopped
name: {name}

model:
  path: {model}

data:
  train: {train}
{validation}{keys}  max_prompt_tokens: {max_prompt_tokens}
  overlong: filter           # rows with longer prompts are left out, and counted

{generated}batch:
  prompts_per_step: 16
{samples}  max_tokens_per_micro_batch: 2048

algorithm:
  name: {algorithm}

optimizer:
  learning_rate: 1e-5

schedule:
  steps: 40

checkpoint:
  every: 20
"""

GENERATED = """\
environment:
  reward: {{name: {reward}}}   # or a function of yours: my_rewards.py:score

rollout:
  max_response_tokens: {max_response_tokens}

"""


def init(
    file: Annotated[Path, typer.Argument(help="The recipe to write; must not exist.")] = Path("recipe.yaml"),
    model: Annotated[str | None, typer.Option(help=QUESTIONS["model"] + ".", show_default=False)] = None,
    data: Annotated[str | None, typer.Option(help=QUESTIONS["data"] + ".", show_default=False)] = None,
    algorithm: Annotated[str | None, typer.Option(help=QUESTIONS["algorithm"] + ".", show_default=False)] = None,
    reward: Annotated[
        str | None, typer.Option(help="Reward, as in a recipe. Default: what the data goes with.", show_default=False)
    ] = None,
) -> None:
    """Write a recipe to begin with. Asks for what is not given; without a terminal takes a small task for a laptop."""
    from corral.cli.planning import with_plan
    from corral.data.plugins import is_spec
    from corral.data.sources import is_generated
    from corral.hub import is_gguf, is_only_path
    from corral.model.builtin_models import install_packages, no_model
    from corral.recipe.document import parse_document
    from corral.recipe.load import recipe_from
    from corral.recipe.parts import PRESETS, Preset

    if file.exists():
        raise UserError(f"{file} is there already: `corral init` does not overwrite; name another file")
    given = {"model": model, "data": data, "algorithm": algorithm}
    is_terminal = sys.stdin.isatty()
    chosen = {
        key: value or (typer.prompt(QUESTIONS[key], default=DEFAULTS[key]) if is_terminal else DEFAULTS[key])
        for key, value in given.items()
    }
    path = chosen["model"]
    folder = Path(path).expanduser()
    if is_only_path(path) and not (folder.is_file() if is_gguf(path) else folder.is_dir()):
        raise UserError(f"--model: {no_model(path)}")
    # An unknown algorithm is refused with the whole recipe below.
    preset = PRESETS.get(chosen["algorithm"], Preset())
    tasks = PAIR_TASKS if preset.trains_on_pairs else TASKS
    source, options = chosen["data"], ""
    if preset.trains_on_pairs and source.partition(":")[0] == "arithmetic":
        options = ", options: {pairs: true}"
    elif preset.trains_on_pairs and (source in TASKS or is_generated(source)):
        raise UserError(
            f"{source} has no pairs of answers, which {chosen['algorithm']} trains on; take --data arithmetic "
            "or a file whose rows have `chosen` and `rejected`"
        )
    task = tasks.get(source)
    if task is None and (is_generated(source) or source.startswith(("hf:", "ms:")) or is_spec(source)):
        task = StarterTask(f"{{path: {written(source)}{options}}}")
    task = task or task_of_files(source, preset)
    text = starter_recipe(file, task, chosen, reward or task.reward, preset.trains_on_rows)
    with_plan(recipe_from(parse_document(text, str(file))))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("x", encoding="utf-8") as out:
        out.write(text)
    print(f"wrote {file}: {chosen['algorithm']}, {chosen['model']}, {chosen['data']}")
    print("next:")
    quoted = shlex.quote(str(file))
    for command in (task.prepare, install_packages(chosen["model"]), f"corral plan {quoted}", f"corral train {quoted}"):
        if command is not None:
            print(f"  {command}")


# --- rows of the user's


QUESTIONS_OF_ROWS = ("prompt", "question", "problem", "instruction", "query", "input", "messages")
ANSWERS_OF_ROWS = ("answer", "final_answer", "solution", "ground_truth", "target", "label", "output", "completion")
"""Names of columns, the likeliest first."""
NUM_ROWS = 50
"""Rows of a file that are looked at."""


def task_of_files(pattern: str, preset: "Preset") -> StarterTask:
    """What the first rows of files look like: which columns have question and answer, and how answers are compared."""
    from corral.data.sources import columns_of, read_files

    rows = [columns_of(found) for _, found in islice(read_files([pattern]), NUM_ROWS)]
    if not rows:
        raise UserError(f"{pattern}: there are no rows in it")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    keys, answers = dict[str, str](), list[str]()
    if preset.trains_on_pairs:
        likely_column(pattern, "chosen", columns, ("chosen",))
        likely_column(pattern, "rejected", columns, ("rejected",))
    elif not (preset.trains_on_rows and {"messages", "conversations"} & {*columns}):
        keys["prompt_key"] = likely_column(pattern, "question", columns, QUESTIONS_OF_ROWS)
        if "reward_model" not in columns:  # verl's rows
            name = likely_column(pattern, "answer", columns, ANSWERS_OF_ROWS[:: -1 if preset.trains_on_rows else 1])
            keys["completion_key" if preset.trains_on_rows else "answer_key"] = name
            answers = [str(row[name]) for row in rows if row.get(name) is not None]
    usual = {"prompt_key": "prompt", "answer_key": "answer", "completion_key": "completion"}
    lines = "".join(f"  {key}: {written(name)}\n" for key, name in keys.items() if usual[key] != name)
    held_out = next(filter(None, (sibling(pattern, name) for name in ("validation", "valid", "dev", "test"))), None)
    return StarterTask(
        train=f"{{path: {written(pattern)}}}",
        keys=lines,
        validation=None if held_out is None else f"{{path: {written(held_out)}, max_rows: 200}}",
        reward=reward_for(answers),
    )


def likely_column(pattern: str, what: str, columns: Sequence[str], names: Sequence[str]) -> str:
    found = next((name for name in names if name in columns), None)
    if found is None:
        raise UserError(
            f"{pattern}: no column looks like the {what}: it has {', '.join(columns)}. Rename one to `{names[0]}`, or "
            "write the recipe by hand: docs/data.md says which keys name columns"
        )
    return found


def sibling(pattern: str, name: str) -> str | None:
    """The file of another split beside it: `test.jsonl` of `train.jsonl`."""
    path = Path(pattern)
    other = path.with_name(path.name.replace("train", name))
    return str(other) if other != path and other.is_file() else None


def reward_for(answers: Sequence[str]) -> str:
    """How most of the answers are compared with a response's."""

    def most(pattern: str) -> bool:
        return sum(bool(re.search(pattern, one)) for one in answers) > len(answers) / 2

    if most(r"####\s*\S"):
        return "gsm8k"
    if most(r"\\(boxed|frac|sqrt)|^\$.*\$$"):
        return "math"
    return "number" if most(r"^\s*-?[\d,]*\.?\d+\s*$") else "exact"


def starter_recipe(file: Path, task: StarterTask, chosen: dict[str, str], reward: str, trains_on_rows: bool) -> str:
    """`trains_on_rows`: on answers that rows have, so that nothing is sampled but in validation."""
    data = Path(chosen["data"].partition(":")[2] or chosen["data"]).stem
    # Two recipes with the same data are two runs.
    name = f"{data}-{chosen['algorithm']}" if file.name == "recipe.yaml" else file.stem
    generated = GENERATED.format(reward=written(reward), max_response_tokens=task.max_response_tokens)
    return RECIPE.format(
        file=file,
        name=written(name),
        model=written(chosen["model"]),
        train=task.train,
        keys=task.keys,
        validation="" if task.validation is None else f"  validation: {task.validation}\n",
        max_prompt_tokens=task.max_prompt_tokens,
        generated="" if trains_on_rows and task.validation is None else generated,
        samples="" if trains_on_rows else "  samples_per_prompt: 8\n",
        algorithm=written(chosen["algorithm"]),
    )


def written(value: str) -> str:
    """A text as YAML has it, also inside of braces."""
    from corral.recipe.document import plain_scalar

    is_plain = re.fullmatch(r"[\w./-]+(:[\w./-]+)?", value) is not None and plain_scalar(value) == value
    return value if is_plain else json.dumps(value)
