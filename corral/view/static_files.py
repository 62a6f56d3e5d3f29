"""`corral view --export`: the page of `corral view` and every answer that it may ask for, as files."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from corral.observe.run_files import json_line, write_atomically
from corral.recipe.errors import UserError, first_line
from corral.view.runs import NotFound, Runs
from corral.view.view_server import PAGE


def export(folders: Sequence[Path], out: Path, report: Callable[[str], None] = print) -> None:
    """Writes a new folder for any web server. What cannot be read of a run is reported and left out."""
    runs = Runs(folders)
    if out.exists():
        raise UserError(f"{out} exists already; name a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    num_files = 0
    # Written beside `out` and renamed at the end: an export that fails leaves no half of a site in the way of the next.
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        site = Path(folder) / "site"
        shutil.copytree(PAGE, site)
        for name, content in answers(runs, report):
            if content is None:
                continue
            path = site / "api" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json_line(content).decode())
            num_files += 1
        site.rename(out)
    report(f"wrote {out}: {len(runs.all())} runs, {num_files} files; any web server can serve it")


def answers(runs: Runs, report: Callable[[str], None]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yields the name of each file and its content, None where that cannot be read."""
    warnings: set[str] = set()

    def read(answer: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any] | None:
        try:
            return answer(*arguments)
        except (UserError, NotFound, OSError, ValueError) as error:
            warning = f"warning: left out: {first_line(error)}"
            if warning not in warnings:  # a damaged file has many trajectories
                report(warning)
            warnings.add(warning)
            return None

    yield "runs.json", {**runs.overview(), "live": False}
    for run in runs.all():
        detail = run.detail()
        yield f"run/{run.id}/run.json", detail
        for name, own in {
            "metrics": run.all_metrics,
            "samples": run.samples,
            "ledger": run.audit,
            "workers": run.workers,
        }.items():
            yield f"run/{run.id}/{name}.json", own()
        prompts: set[int] = set()
        for step, part in detail["parts"]:
            name = f"{step}.{part}" if part else str(step)
            listed = read(run.step, step, part)
            yield f"run/{run.id}/step/{name}.json", listed
            for one in listed["trajectories"] if listed else ():
                yield f"run/{run.id}/step/{name}/{one['index']}.json", read(run.trajectory, step, part, one["index"])
                prompts |= {one["prompt_id"]} if not part and "prompt_id" in one else set()
        if run.file("ledger.jsonl"):
            for prompt_id in sorted(prompts):
                yield f"run/{run.id}/prompt/{prompt_id}.json", read(run.prompt, prompt_id)
        for log in detail["logs"]:
            yield f"run/{run.id}/log/{log}.json", read(run.log, log)
