"""`corral env test`: try an environment out before training in it."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corral.cli.planning import examples
from corral.recipe.errors import RunError, UserError

if TYPE_CHECKING:
    from corral.data.rows import Row

EXAMPLES = examples("corral env test frozen_lake --options '{size: 5}'", "corral env test my_env.py:MyEnv")

app = typer.Typer(help="Try environments out.", no_args_is_help=True, epilog=EXAMPLES)


@app.callback()
def env() -> None:
    """Try environments out."""


@app.command("test", epilog=EXAMPLES)
def try_environment(
    name: Annotated[str, typer.Argument(help="frozen_lake, sokoban, ..., module:Class or file.py:Class.")],
    options: Annotated[str, typer.Option(help="Its options, as in a recipe: '{size: 5, slippery: true}'.")] = "{}",
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 200,
    max_turns: Annotated[int, typer.Option(min=1, help="Turns of an episode, at most.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of boards and of the random policy.")] = 0,
    rows: Annotated[
        str | None,
        typer.Option(help="Rows to use instead of boards: rows.jsonl, reasoning_gym:TASK.", show_default=False),
    ] = None,
    reward: Annotated[str, typer.Option(help="Reward function, for environments that ask for one.")] = "exact",
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one call of the environment.")] = 10.0,
) -> None:
    """Run an environment with random and optimal policies, and check that it keeps the contract.

    The same seed must be the same episode, here and in another process; no reply may make it raise or hang. Exits
    with 1 if something is wrong.
    """
    from corral.envs.env_checks import check_environment
    from corral.recipe.schema import Environment, Reward

    if not math.isfinite(timeout):
        raise UserError(f"--timeout must be a finite number of seconds, not {timeout}")
    environment = Environment(name=name, options=parsed(options), reward=Reward(name=reward), timeout_s=timeout)
    loaded = load(rows, episodes, seed)
    print(f"{name}: {episodes} episodes of at most {max_turns} turns")
    report = check_environment(environment, [loaded[n % len(loaded)] for n in range(episodes)], max_turns, seed)
    for line in report.passed:
        print(f"  ok      {line}")
    for line in report.failed:
        print(f"  FAILED  {line}")
    if report.failed:
        raise RunError(f"{name}: {len(report.failed)} of {len(report.failed) + len(report.passed)} checks failed")
    for line in report.notes:
        print(f"  note    {line}")
    print(f"  {report.steps_per_s:,.0f} steps/s")
    print(f"  random  {scores(report.baseline.random_reward, report.baseline.random_success)}")
    print(f"  best    {scores(report.baseline.best_reward, report.baseline.best_success)}")
    print("\nthe first messages of an episode:")
    for message in report.first_messages:
        print("\n".join(f"  {message['role']:>9} | {line}" for line in message["content"].splitlines()))


def parsed(options: str) -> dict[str, Any]:
    from corral.recipe.document import compose, plain

    node = compose(options, "--options")
    found = None if node is None else plain(node)
    if not isinstance(found, dict):
        raise UserError(f"--options must be a mapping, such as '{{size: 5}}'; it is {options!r}")
    return found


def load(rows: str | None, episodes: int, seed: int) -> "list[Row]":
    from corral.data.sources import is_generated, load_rows
    from corral.recipe.schema import Data, Source

    path = "boards" if rows is None else rows
    if is_generated(path):
        source = Source(path=path, size=episodes, seed=seed)
    else:
        source = Source(path=str(Path(path).expanduser()), max_rows=episodes)
    return load_rows(source, Data(train=source))


def scores(reward: float | None, success: float | None) -> str:
    if reward is None:
        return "it has no such policy"
    return f"reward {reward:.3f}" + ("" if success is None else f", success {success:.1%}")
