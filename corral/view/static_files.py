"""`corral view --export`: the page of `corral view` and every answer that it may ask for, as files."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from corral.observe.run_files import json_line, write_atomically
from corral.recipe.errors import UserError
from corral.view.runs import Runs
from corral.view.view_server import PAGE


def export(folders: Sequence[Path], out: Path, report: Callable[[str], None] = print) -> None:
    """Writes a new folder for any web server."""
    runs = Runs(folders)
    if out.exists():
        raise UserError(f"{out} exists already; name a new folder")
    shutil.copytree(PAGE, out)
    num_files = 0
    for name, content in answers(runs):
        path = out / "api" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json_line(content).decode())
        num_files += 1
    report(f"wrote {out}: {len(runs.all())} runs, {num_files} files; any web server can serve it")


def answers(runs: Runs) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "runs.json", {**runs.overview(), "live": False}
    for run in runs.all():
        detail = run.detail()
        yield f"run/{run.id}/run.json", detail
        yield f"run/{run.id}/workers.json", run.workers()
        prompts: set[int] = set()
        for step, part in detail["parts"]:
            name = f"{step}.{part}" if part else str(step)
            listed = run.step(step, part)
            yield f"run/{run.id}/step/{name}.json", listed
            for one in listed["trajectories"]:
                yield f"run/{run.id}/step/{name}/{one['index']}.json", run.trajectory(step, part, one["index"])
                prompts |= {one["prompt_id"]} if not part and "prompt_id" in one else set()
        if run.file("ledger.jsonl"):
            for prompt_id in sorted(prompts):
                yield f"run/{run.id}/prompt/{prompt_id}.json", run.prompt(prompt_id)
        for log in detail["logs"]:
            yield f"run/{run.id}/log/{log}.json", run.log(log)
