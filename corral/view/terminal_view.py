"""Runs in a terminal: `corral status RUN` follows one, `corral compare RUN RUN ...` puts several beside each other.

Both read run folders as the page does (`runs.py`), and change nothing in them.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from corral.observe.console import PLAIN_WIDTH, cut, duration, short_duration, small_number, visible
from corral.observe.console import score_text as metrics_score_text
from corral.observe.curve import LOSSES, points
from corral.recipe.errors import UserError
from corral.view.runs import RunReader, is_run, stacks_of, tail_lines, thinned

LOOK_EVERY_S = 1.0
WORKERS_EVERY_S = 10.0
"""Time between two looks at what the processes of the run do: py-spy stops each of them for a moment."""
NUM_WARNINGS = 3
LAST_STEPS = 10
"""Number of steps over which the reward at the end of a run is averaged."""
STAGES = ("rollout", "logprobs", "train", "transfer")
CURVES = ("reward/mean", *LOSSES, "policy/entropy", "kl/mean", "length/mean", "speed/tokens_per_s")
BARS = "▁▂▃▄▅▆▇█"
STYLES = {"running": "bold green", "failed": "bold red", "stopped": "yellow", "finished": "bold"}


def open_runs(folders: Sequence[Path]) -> list[RunReader]:
    """Each is called by its folder's name or, where several have the same, by its path."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; name that of a run, such as runs/my-run")
        if not is_run(folder):
            raise UserError(f"{folder} is not the folder of a run: it has neither a recipe.yaml nor metrics.jsonl")
    paths = [folder.resolve() for folder in folders]
    if twice := [str(path) for path in paths if paths.count(path) > 1]:
        raise UserError(f"{twice[0]} is named twice")
    names = [path.name for path in paths]
    return [RunReader(path.name if names.count(path.name) == 1 else str(path), path) for path in paths]


# --- one run


def watch(run: RunReader, once: bool = False) -> None:
    """Shows the run until it ends or Ctrl-C is pressed; without a terminal, and with `once`, as it is now."""
    is_terminal = sys.stdout.isatty()
    console = RichConsole(width=None if is_terminal else PLAIN_WIDTH, highlight=False, emoji=False)
    find_workers = at_most_every(WORKERS_EVERY_S, lambda: workers(run))
    status = run_status(run, find_workers)
    if once or not console.is_interactive or status["state"] != "running":
        console.print(status_view(status, console.width))
        return
    try:
        with Live(status_view(status, console.width), console=console, auto_refresh=False) as live:
            while status["state"] == "running":
                time.sleep(LOOK_EVERY_S)
                status = run_status(run, find_workers)
                live.update(status_view(status, console.width), refresh=True)
    except KeyboardInterrupt:
        console.print("the run goes on", style="dim")


def at_most_every(seconds: float, look: Callable[[], Any]) -> Callable[[], Any]:
    """`look`, which is called again only when its last answer is older than that."""
    answer: Any = None
    looked_at: float | None = None

    def cached() -> Any:
        nonlocal answer, looked_at
        if looked_at is None or time.monotonic() - looked_at >= seconds:
            answer, looked_at = look(), time.monotonic()
        return answer

    return cached


def run_status(run: RunReader, find_workers: Callable[[], Any] | None = None) -> dict[str, Any]:
    """What `corral status RUN --json` prints: the summary of the list of runs, and the last numbers of the run."""
    summary, (_, rows) = run.summary(), run.metrics.read()
    log = tail_lines(run.file("logs", "main.log"))
    curves = {name: points(rows, name)[1] for name in CURVES}
    step_s = points(rows, "time/step_s")[1]
    left = None if summary["num_steps"] is None else summary["num_steps"] - summary["step"]
    is_running = summary["state"] == "running"
    found = find_workers or (lambda: workers(run))
    return {
        **summary,
        "eta_s": left * fmean(step_s[-2 * LAST_STEPS :]) if is_running and left is not None and step_s else None,
        "metrics": {name: {"last": values[-1], "values": thinned(values)} for name, values in curves.items() if values},
        "step_s": step_s[-1] if step_s else None,
        "stages_s": stages(rows),
        "warnings": [line for line in log if " WARNING " in line or " ERROR " in line][-NUM_WARNINGS:],
        "workers": found() if is_running else [],
    }


def stages(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each stage of the last step; what no stage has measured is `other`."""
    last = next((row for row in reversed(rows) if row.get("time/step_s") is not None), None)
    if last is None:
        return {}
    found = {name: last[f"time/{name}_s"] for name in STAGES if last.get(f"time/{name}_s") is not None}
    return {**found, "other": max(0.0, last["time/step_s"] - sum(found.values()))}


def workers(run: RunReader) -> list[dict[str, Any]]:
    """What the processes of a run do: those of a cluster, as its controller has last written it, else those of this
    machine, where the run is this user's."""
    if of_cluster := run.workers()["workers"]:
        return [
            {
                "pid": one["pid"],
                "what": f"device {one['device']} on {one['node']}, {'+'.join(one['roles'])}",
                "doing": one["state"] if one["since"] is None else f"{one['call']} for {ago(one['since'])}",
            }
            for one in of_cluster
        ]
    return [{"pid": one.pid, "what": what, "doing": one.doing} for what, one in stacks_of(run.path)]


def ago(since: float) -> str:
    return short_duration(max(0.0, time.time() - since))


def status_view(status: Mapping[str, Any], width: int) -> Group:
    count = f"step {status['step']}" + (f"/{status['num_steps']}" if status["num_steps"] else "")
    eta = f"about {duration(status['eta_s'])} left" if status["eta_s"] is not None else ""
    about = [count, eta, *(str(status[name]) for name in ("algorithm", "model") if status[name])]
    head = Text.assemble(
        (visible(status["id"]), "bold"),
        "  ",
        (status["state"], STYLES.get(status["state"], "dim")),
        "  ",
        visible(", ".join(filter(None, about))),
    )
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for name, curve in status["metrics"].items():
        table.add_row(Text(name, "dim"), Text(number_text(curve["last"])), Text(sparkline(curve["values"])))
    if status["before"] is not None:
        scores = [score_text(status[name]) for name in ("before", "after") if status[name] is not None]
        table.add_row(Text("validation", "dim"), Text(scores[-1]), Text(" -> ".join(scores) if scores[1:] else ""))
    if status["step_s"] is not None:
        table.add_row(Text("step", "dim"), Text(short_duration(status["step_s"])), stage_text(status["stages_s"]))
    lines = [Text(visible(f"{one['what']}, pid {one['pid']}: {one['doing']}"), "dim") for one in status["workers"]]
    lines += [Text(visible(line), "yellow") for line in (*status["warnings"], *status["problems"])]
    if status["state"] == "failed":
        lines = [line for line in lines if line.plain != visible(status["last_line"])]
        lines.append(Text(visible(status["last_line"]), "bold red"))
    written = "" if status["updated"] is None else f", written {duration(time.time() - status['updated'])} ago"
    where = Text(visible(f"{status['folder']}{written}"), "dim")
    cuts = [Text(cut(line.plain, width, "start"), line.style) for line in (where, *lines)]
    return Group(head, cuts[0], table, *cuts[1:])


def sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def stage_text(stages_s: Mapping[str, float]) -> Text:
    total = sum(stages_s.values()) or 1.0
    shown = {name: seconds / total for name, seconds in stages_s.items() if seconds >= 0.005 * total}
    return Text(", ".join(f"{name} {share:.0%}" for name, share in shown.items()))


def number_text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 1 else small_number(value)


def score_text(found: Mapping[str, Any] | None) -> str:
    """31.0 % ± 4.1, as the console has it; a loss as `loss 0.4311`."""
    if found is None or found["value"] is None:
        return ""
    name = "validation/loss" if found["kind"] == "loss" else "validation/mean@1"
    others = {f"validation/{other}": found[other] for other in ("ci95", "min", "max") if found[other] is not None}
    return metrics_score_text({name: found["value"], **others})


# --- several runs


def compare(runs: Sequence[RunReader]) -> dict[str, Any]:
    """What `corral compare --json` prints: measures of each run, and by key of the recipe what those that have it say,
    where they differ. A run without the key has the default."""
    recipes = [run.recipe()[0] for run in runs]
    differing = {
        key: {run.id: recipe[key] for run, recipe in zip(runs, recipes, strict=True) if key in recipe}
        for key in sorted({key for recipe in recipes for key in recipe} - {"name"})
        if any(key not in recipe or recipe[key] != recipes[0].get(key) for recipe in recipes)
    }
    return {"runs": [measures(run) for run in runs], "recipe": differing}


def measures(run: RunReader) -> dict[str, Any]:
    summary, (_, rows) = run.summary(), run.metrics.read()
    end = {name: points(rows, name)[1][-LAST_STEPS:] for name in ("reward/mean", *LOSSES)}
    step_s, tokens = (points(rows, name)[1] for name in ("time/step_s", "speed/tokens_per_s"))
    spent = [points(rows, f"time/{name}_s")[1] for name in ("step", "validate", "save")]
    kept = ("id", "folder", "state", "step", "num_steps", "before", "after", "problems")
    return {
        **{name: summary[name] for name in kept},
        "end": {name: fmean(values) for name, values in end.items() if values},
        "seconds_per_step": median(step_s) if step_s else None,
        "tokens_per_s": median(tokens) if tokens else None,
        "minutes": sum(map(sum, spent)) / 60 if step_s else None,
    }


def print_comparison(found: Mapping[str, Any]) -> None:
    console = RichConsole(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, emoji=False)
    console.print(comparison_table(found))
    for run in found["runs"]:
        for problem in run["problems"]:
            console.print(Text(f"warning: {visible(run['id'])}: {visible(problem)}", "yellow"))


def comparison_table(found: Mapping[str, Any]) -> Table:
    runs = found["runs"]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(Text(visible(run["id"])), overflow="fold")

    def add(label: str, cells: Sequence[str]) -> None:
        if any(cells):
            table.add_row(Text(visible(label), "dim"), *(Text(cell or "-") for cell in cells))

    add("state", [run["state"] for run in runs])
    add("steps", [f"{run['step']}" + (f"/{run['num_steps']}" if run["num_steps"] else "") for run in runs])
    add("held-out score before", [score_text(run["before"]) for run in runs])
    add("held-out score after", [score_text(run["after"]) for run in runs])
    for name in ("reward/mean", *LOSSES):
        ends = [run["end"].get(name) for run in runs]
        add(f"{name}, last {LAST_STEPS} steps", ["" if end is None else number_text(end) for end in ends])
    for name in ("seconds_per_step", "tokens_per_s", "minutes"):
        values = [run[name] for run in runs]
        add(name.replace("_", " "), ["" if value is None else f"{value:,.4g}" for value in values])
    table.add_section()
    for key, by_run in found["recipe"].items():
        add(key, [visible(str(by_run[run["id"]])) if run["id"] in by_run else "default" for run in runs])
    if not found["recipe"]:
        add("recipe", ["the same but for the name", *[""] * (len(runs) - 1)])
    return table
