"""`corral init`: a first recipe, by options or by questions, to be changed afterwards."""

import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from corral.recipe.errors import UserError

DEFAULTS = {"model": "smollm2-135m-instruct", "data": "arithmetic", "algorithm": "grpo"}
QUESTIONS = {
    "model": "Model: a folder, a name on the hub, or smollm2-135m-instruct",
    "data": "Data: arithmetic, gsm8k, or a file with rows (.jsonl, .parquet)",
    "algorithm": "Algorithm: grpo, ppo, dapo, sft, ...",
}


@dataclass(frozen=True)
class StarterTask:
    """Data with the reward that goes with it. `prepare`: the command that makes the files."""

    train: str
    validation: str | None = None
    reward: str = "exact"
    max_prompt_tokens: int = 512
    max_response_tokens: int = 512
    prepare: str | None = None


def arithmetic(options: str) -> StarterTask:
    return StarterTask(
        f"{{path: arithmetic:addition, size: 1200, options: {{{options}, part: train}}}}",
        f"{{path: arithmetic:addition, size: 150, options: {{{options}, part: validation}}}}",
        reward="number",
        max_prompt_tokens=64,
        max_response_tokens=32,
    )


TASKS = {
    "arithmetic": arithmetic("min: 10, max: 49"),
    "gsm8k": StarterTask(
        "{path: data/gsm8k/train.parquet}",
        "{path: data/gsm8k/test.parquet, max_rows: 200}",
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
{validation}  max_prompt_tokens: {max_prompt_tokens}
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
    from corral.data.sources import is_generated
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
    task = tasks.get(source) or StarterTask(f"{{path: {written(source)}{options}}}")
    text = starter_recipe(file, task, chosen, reward or task.reward, preset.trains_on_rows)
    with_plan(recipe_from(parse_document(text, str(file))))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("x", encoding="utf-8") as out:
        out.write(text)
    print(f"wrote {file}: {chosen['algorithm']}, {chosen['model']}, {chosen['data']}")
    print("next:")
    quoted = shlex.quote(str(file))
    for command in (task.prepare, f"corral plan {quoted}", f"corral train {quoted}"):
        if command is not None:
            print(f"  {command}")


def starter_recipe(file: Path, task: StarterTask, chosen: dict[str, str], reward: str, trains_on_rows: bool) -> str:
    """`trains_on_rows`: on answers that rows have, so that nothing is sampled but in validation."""
    stem = Path(chosen["data"].partition(":")[2] or chosen["data"]).stem
    generated = GENERATED.format(reward=written(reward), max_response_tokens=task.max_response_tokens)
    return RECIPE.format(
        file=file,
        name=written(f"{stem}-{chosen['algorithm']}"),
        model=written(chosen["model"]),
        train=task.train,
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
