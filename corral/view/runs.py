"""Run folders as `corral view` shows them, whatever state they are in: being written, finished, failed, broken, empty.

Nothing here writes, and a file that cannot be read is a problem to show, no error: the run that failed is the one that
people look at. Runs are named by ids that `Runs` hands out, and files are opened only inside their run's own folder, so
no request can name a path.
"""

import json
import os
import re
import socket
import sys
import threading
import time
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.observe.console import ENDED_BY, held_out_score, is_validation
from corral.observe.curve import LOSSES
from corral.observe.ledger import Ledger
from corral.observe.run_folder import LOCK, is_in_use, latest_recipe
from corral.observe.trackers import flat
from corral.observe.trajectory_store import TrajectoryStore
from corral.recipe.document import read_document
from corral.recipe.errors import UserError, first_line

if TYPE_CHECKING:
    from corral.cluster.stacks import ProcessStacks

SPARKLINE_POINTS = 60
TAIL_BYTES = 256 * 1024
LAST_LINE_BYTES = 2048
STACKS_EVERY_S = 2.0
MOST_PLAN_BYTES, MOST_DRAWN_DEVICES = 2**24, 16_384
PREVIEW_CHARS = 240
MOST_STEPS, SAMPLES_OF_STEP = 128, 64
"""What the pictures of rewards show of a run."""
SAMPLE_COLUMNS = ("reward", "num_generated")
ENDED = f" ERROR {ENDED_BY}: "
OWNER = re.compile(r"process ([0-9]+) on (.+)")
NUMBERS = frozenset((int, float))
FILES_OF_RUNS = ("recipe.yaml", "metrics.jsonl", "checkpoints", ".lock")


class NotFound(LookupError):
    """What was asked for is not there."""


class Runs:
    """The runs in the given folders, each of which is a run's own or one around several. New ones are found later."""

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise UserError(f"{folder} is no folder; name a run's folder, or one with runs in it")
        self.folders = [folder.resolve() for folder in folders]
        self._by_id: dict[str, RunReader] = {}
        self._lock = threading.Lock()

    def all(self) -> list["RunReader"]:
        with self._lock:
            known = {run.path for run in self._by_id.values()}
            for path in dict.fromkeys(path for folder in self.folders for path in find_runs(folder)):
                if path not in known:
                    ids = (path.name if number == 1 else f"{path.name}.{number}" for number in count(1))
                    new = next(run_id for run_id in ids if run_id not in self._by_id)
                    self._by_id[new] = RunReader(new, path)
            return [run for run in self._by_id.values() if run.path.is_dir()]

    def get(self, run_id: str) -> "RunReader":
        found = next((run for run in self.all() if run.id == run_id), None)
        if found is None:
            raise NotFound(f"there is no run {run_id}")
        return found

    def overview(self) -> dict[str, Any]:
        return {"folders": [str(folder) for folder in self.folders], "runs": [run.summary() for run in self.all()]}


def find_runs(folder: Path) -> Iterator[Path]:
    """The folder itself, if it is a run's, else the runs in it. Links are not followed."""
    if is_run(folder):
        yield folder
    else:
        yield from sorted(path for path in folder.iterdir() if not path.is_symlink() and path.is_dir() and is_run(path))


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in FILES_OF_RUNS)


class RunReader:
    """One run's folder."""

    def __init__(self, run_id: str, path: Path) -> None:
        self.id, self.path = run_id, path
        self.metrics, self.store = MetricsReader(path / "metrics.jsonl"), TrajectoryStore(path / "trajectories")
        self._stacks: tuple[float, list[dict[str, Any]]] | None = None
        self._stacks_lock = threading.Lock()
        self._ledger: Ledger | None = None
        self._ledger_lock = threading.Lock()

    def file(self, *names: str) -> Path | None:
        """A regular file of this run. None: there is none, or it is a link to somewhere else."""
        path = self.path.joinpath(*names)
        inside = path.is_file() and path.resolve().is_relative_to(self.path)
        return path if inside else None

    def summary(self) -> dict[str, Any]:
        """What the list of runs shows."""
        (_, steps, columns), (recipe, problems) = self.metrics.table(), self.recipe()
        if self.metrics.num_broken:
            problems.append(f"metrics.jsonl: {self.metrics.num_broken} lines cannot be read")
        validations = first_and_last_validation(columns)
        curve = next((name for name in ("reward/mean", *LOSSES) if name in columns), next(iter(LOSSES)))
        step, num_steps = steps[-1] if steps else 0, self.num_steps(recipe)
        files = {name: self.file(*name.split("/")) for name in ("metrics.jsonl", "logs/main.log", ".lock")}
        written = {name: path.stat().st_mtime for name, path in files.items() if path is not None}
        log = tail_lines(files["logs/main.log"])
        # A run that failed, was started again and killed has measured something after its last line.
        failed = bool(log) and ENDED in log[-1] and written["logs/main.log"] >= written.get("metrics.jsonl", 0)
        return {
            "id": self.id,
            "folder": str(self.path),
            "state": self.state(step, num_steps, failed),
            "last_line": log[-1] if log else "",
            "step": step,
            "num_steps": num_steps,
            "updated": max(written.values(), default=None),
            "algorithm": recipe.get("algorithm.name"),
            "model": recipe.get("model.path"),
            "curve": curve,
            "sparkline": thinned([value for value in columns.get(curve, ()) if value is not None]),
            "before": score(validations[0]) if validations else None,
            "after": score(validations[-1]) if len(validations) > 1 else None,
            "tokens_per_s": next((value for value in columns.get("speed/tokens_per_s", [])[::-1] if value), None),
            "problems": problems,
        }

    def detail(self) -> dict[str, Any]:
        """What the page of a run shows besides its metrics: its summary, recipe, plan, and what else there is to
        open."""
        recipe = latest_recipe(self.path)
        texts = {"recipe": self.file(recipe.name) if recipe else None, "plan": self.file("plan.txt")}
        return {
            **self.summary(),
            "recipe": self.recipe()[0],
            "texts": {name: "\n".join(tail_lines(path)) for name, path in texts.items()},
            "placement": read_placement(self.file("plan.json")),
            "logs": sorted(path.name for path in self.path.glob("logs/*.log") if self.file("logs", path.name)),
            "parts": self.parts(),
            "has_ledger": self.file(Ledger.name) is not None,
        }

    def all_metrics(self) -> dict[str, Any]:
        """All metrics, a list of values for each. `position` says which rows of the file they are of."""
        position, steps, columns = self.metrics.table()
        return {"position": position, "steps": steps, "columns": columns}

    def samples(self) -> dict[str, Any]:
        """Rewards and lengths of some samples of at most `MOST_STEPS` steps, evenly spread over the run."""
        steps = [step for step, part in self.parts() if not part]
        every = 1
        while len(steps) > every * MOST_STEPS:  # the same steps as before are looked at when some are added
            every *= 2
        found = []
        for step in steps[::every]:
            with suppress(UserError, OSError):  # a file that cannot be read
                found.append(read_samples(self.store, step, self.store.written_at(step)))
        return {"steps": found}

    def recipe(self) -> tuple[dict[str, Any], list[str]]:
        """The keys that the run was last started with, dotted, and what is wrong with the file. Nothing that it names
        is loaded."""
        path = latest_recipe(self.path)
        if path is None or self.file(path.name) is None:
            return {}, []
        try:
            return read_keys(path, path.stat().st_mtime_ns), []
        except (UserError, OSError, UnicodeDecodeError) as error:
            return {}, [first_line(error)]

    def num_steps(self, recipe: Mapping[str, Any]) -> int | None:
        """The length of the run, where it is known: from the recipe, else, of epochs, from the newest checkpoint."""
        if isinstance(steps := recipe.get("schedule.steps"), int):
            return steps
        for folder in self._checkpoints():
            if path := self.file("checkpoints", folder.name, "state.json"):
                with suppress(OSError, ValueError, KeyError, TypeError):
                    return int(json.loads(path.read_bytes())["num_steps"])
        return None

    def state(self, step: int, num_steps: int | None, failed: bool) -> str:
        """running, finished, failed, stopped, or empty: nothing was computed yet."""
        if is_in_use(self.path):
            return "running"
        if failed or self.metrics.size == 0:
            return "failed" if failed else "empty"
        return "finished" if num_steps is not None and step >= num_steps else "stopped"

    def parts(self) -> list[tuple[int, str]]:
        return [] if (self.path / "trajectories").is_symlink() else self.store.parts()

    def step(self, step: int, part: str) -> dict[str, Any]:
        """The trajectories of a step in short: every column of the store's summaries, long texts cut."""
        self._check_part(step, part)
        rows = [{name: preview(value) for name, value in row.items()} for row in self.store.summaries(step, part)]
        return {"step": step, "part": part, "trajectories": rows}

    def trajectory(self, step: int, part: str, index: int) -> dict[str, Any]:
        """A whole trajectory, with the text of each token: the store's own or, in files of earlier releases, by the
        tokenizer of the run, where it has one."""
        self._check_part(step, part)
        record = self.store.trajectory(step, index, part)
        if pictures := record.get("pictures"):
            record["pictures"] = [f"data:image/png;base64,{b64encode(one).decode()}" if one else "" for one in pictures]
        if record.get("response_pieces") is not None:
            return {**record, "index": index}
        prompt, response = record.get("prompt_tokens") or [], record.get("response_tokens") or []
        tokenizer = next(filter(None, map(load_tokenizer, self._tokenizer_files())), None)
        texts = None if tokenizer is None else split_tokens(tokenizer, [*prompt, *response])
        own = {"prompt_pieces": texts and texts[: len(prompt)], "response_pieces": texts and texts[len(prompt) :]}
        return {**record, **own, "index": index}

    def _tokenizer_files(self) -> Iterator[Path]:
        """Of the newest checkpoint, else of the model's folder."""
        for folder in self._checkpoints():
            if path := self.file("checkpoints", folder.name, "tokenizer.json"):
                yield path
        model = Path(str(self.recipe()[0].get("model.path"))) / "tokenizer.json"
        if model.is_absolute() and model.is_file():
            yield model

    def _checkpoints(self) -> list[Path]:
        """Newest first."""
        return sorted((self.path / "checkpoints").glob("step_*"), reverse=True)

    def _check_part(self, step: int, part: str) -> None:
        if (step, part) not in self.parts():
            raise NotFound(f"there are no trajectories of step {step}{f' ({part})' if part else ''}")

    def audit(self) -> dict[str, Any]:
        """Of the ledger, of which only what was added since the last time is read."""
        path = self.file(Ledger.name)
        if path is None:
            return {}
        with self._ledger_lock:
            try:
                if self._ledger is None or not self._ledger.read_on():
                    self._ledger = Ledger(path)
                return self._ledger.audit().as_dict()
            except UserError as error:
                self._ledger = None
                return {"problems": [first_line(error)]}

    def prompt(self, prompt_id: int) -> dict[str, Any]:
        path = self.file(Ledger.name)
        if path is None:
            raise NotFound("this run has no ledger")
        return {"prompt": prompt_id, "history": Ledger(path).history_of(prompt_id)}

    def workers(self) -> dict[str, Any]:
        """What the workers of a run on a cluster do, as its controller has last written it, each with the last line of
        its log where that is here. A run in one process has none."""
        path = self.file("logs", "workers.json")
        empty: dict[str, Any] = {"written": None, "workers": []}
        try:
            found = empty if path is None else json.loads(path.read_bytes())
            logs = {one["log"]: self.file("logs", str(one["log"])) for one in found["workers"] if one["log"]}
            last = {name: tail_lines(own, LAST_LINE_BYTES)[-1:] for name, own in logs.items()}
            rows = [{**one, "last_line": "".join(last.get(one["log"], []))} for one in found["workers"]]
            return {**found, "workers": rows}
        except (OSError, ValueError, KeyError, TypeError):
            return empty

    def stacks(self) -> dict[str, Any]:
        """Where the processes of the run are at this moment, those on this machine that are this user's. Asked again
        soon, it answers the same: who looks must not slow a run down."""
        with self._stacks_lock:
            if self._stacks is None or time.monotonic() - self._stacks[0] > STACKS_EVERY_S:
                self._stacks = time.monotonic(), [{"what": what, **one.as_dict()} for what, one in stacks_of(self.path)]
            return {"processes": self._stacks[1]}

    def log(self, name: str) -> dict[str, Any]:
        if name not in {path.name for path in self.path.glob("logs/*.log")} or not (path := self.file("logs", name)):
            raise NotFound(f"there is no log {name}")
        return {"name": name, "size": path.stat().st_size, "lines": tail_lines(path)}


def read_placement(path: Path | None) -> dict[str, Any] | None:
    """The nodes of a run's plan, and which roles and services each device has, with the bytes that it needs at most.
    None: there is no plan that can be read, as in runs of earlier releases."""
    try:
        plan = {} if path is None or path.stat().st_size > MOST_PLAN_BYTES else json.loads(path.read_bytes())
        cluster, memory = plan["cluster"], plan["memory"]
        roles = {role: devices for role, devices in plan["placement"].items() if role != "idle"}
        nodes, per_node = int(cluster["nodes"]), int(cluster["devices_per_node"])
        placed = {role: list(map(int, own)) for role, own in {**roles, **cluster["devices_of_services"]}.items()}
        is_known = all(0 <= device < nodes * per_node for own in placed.values() for device in own)
        if not is_known or min(nodes, per_node) < 1 or nodes * per_node > MOST_DRAWN_DEVICES:
            return None
        return {
            "nodes": nodes,
            "devices_per_node": per_node,
            "roles": placed,
            "memory": [[list(map(int, one["devices"])), max(one["total"].values())] for one in memory],
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


class MetricsReader:
    """The rows of a `metrics.jsonl`, which may be growing: only what is new is read again.

    A resumed run replaces the file by a shorter one. `position` says which rows a reader has, so that one who has those
    of the old file sees that they are gone.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.num_broken = path, 0, 0
        self._file: tuple[int, int] | None = None
        self._generation, self._rows = 0, list[dict[str, Any]]()
        self._steps, self._columns = list[int](), dict[str, list[float | None]]()
        self._lock = threading.Lock()

    def read(self) -> tuple[str, list[dict[str, Any]]]:
        """The position after the last row, and all rows."""
        with self._lock:
            self._read()
            return f"{self._generation}-{len(self._rows)}", list(self._rows)

    def table(self) -> tuple[str, list[int], dict[str, list[float | None]]]:
        """The position after the last row, all steps in order, and of each metric a value for each step, None where it
        has none. A step that was logged again counts once."""
        with self._lock:
            self._read()
            num_steps = len(self._steps)
            columns = {name: [*own, *[None] * (num_steps - len(own))] for name, own in self._columns.items()}
            return f"{self._generation}-{len(self._rows)}", list(self._steps), columns

    def _add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        steps, step = self._steps, row["step"]
        at = len(steps) if not steps or step > steps[-1] else bisect_left(steps, step)
        if at == len(steps) or steps[at] != step:
            steps.insert(at, step)
            for column in self._columns.values():
                if len(column) > at:
                    column.insert(at, None)
        for name, value in row.items():
            if name != "step" and value is not None:
                column = self._columns.setdefault(name, [])
                column += [None] * (at + 1 - len(column))
                column[at] = value

    def read_after(self, position: str) -> tuple[str, list[dict[str, Any]] | None]:
        """The new position, and the rows since `position`; None: those before it have changed, begin anew."""
        now, rows = self.read()
        generation, _, num_known = position.partition("-")
        is_same = now.startswith(f"{generation}-") and num_known.isdigit() and int(num_known) <= len(rows)
        return now, rows[int(num_known) :] if is_same else None

    def _read(self) -> None:
        if self.path.is_symlink():
            return
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if self._file != (found.st_dev, found.st_ino) or found.st_size < self.size:
                    self._file, self.size, self.num_broken = (found.st_dev, found.st_ino), 0, 0
                    self._generation, self._rows = self._generation + 1, []
                    self._steps, self._columns = [], {}
                file.seek(self.size)
                content = file.read()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]  # a last line that is still being written is read next time
        self.size += len(whole)
        for line in whole.splitlines():
            try:
                row = json.loads(line)
                step = int(row["step"])
                if not NUMBERS.issuperset(map(type, row.values())):  # seldom: a null, or what was written by hand
                    row = {key: value if type(value) in NUMBERS else None for key, value in row.items()}
                self._add({**row, "step": step})
            except (ValueError, TypeError, KeyError):
                self.num_broken += 1


@lru_cache(maxsize=1000)
def read_keys(recipe: Path, _written_at: int) -> dict[str, Any]:
    return dict(flat(read_document(recipe).values))


@lru_cache(maxsize=8)
def load_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # the library raises nothing more exact
        return None


def split_tokens(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text. A character of several tokens belongs to the last of them.

    A token is decoded behind the one before it, because a space between two words is part of neither alone.
    """
    texts: list[str] = []
    first = done = 0
    for end in range(1, len(tokens) + 1):
        before = tokenizer.decode(tokens[first:done], skip_special_tokens=False)
        text = tokenizer.decode(tokens[first:end], skip_special_tokens=False)[len(before) :]
        if text.endswith("\ufffd") and end - done < 4 and end < len(tokens):
            texts.append("")  # perhaps the first bytes of a character
            continue
        while text.startswith("\ufffd") and done < end - 1:
            texts[done], text, done = "\ufffd", text[1:], done + 1  # they were not
        texts.append(text)
        first, done = done, end
    return texts


def stacks_of(folder: Path) -> list[tuple[str, "ProcessStacks"]]:
    """Title and stacks of each process of a run, where it is trained by this user on this machine."""
    from corral.cluster.stacks import NUM_THREADS, find_processes, format_title, read_stacks

    owner = OWNER.match("".join(tail_lines(folder / LOCK)[:1]))
    if sys.platform != "linux" or owner is None or owner[2] != socket.gethostname():
        return []
    # By its folder: another run of the same name may be trained on this machine, in another one.
    own = [one for one in find_processes() if one.folder == str(folder.resolve())]
    try:
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            own = list(threads.map(lambda one: read_stacks(one, native=False), own))
    except UserError as error:  # there is no py-spy
        own = [replace(one, problem=first_line(error)) for one in own]
    return [(format_title([one]), one) for one in own]


# --- small things


def first_and_last_validation(columns: Mapping[str, Sequence[float | None]]) -> list[dict[str, float | None]]:
    """Metrics of the first validation and of the last one; less where there are not so many."""
    scores = [own for name, own in columns.items() if is_validation({name: 0.0})]
    places = [at for at in range(max(map(len, scores), default=0)) if any(own[at] is not None for own in scores)]
    ends = list(dict.fromkeys([*places[:1], *places[-1:]]))
    return [{name: own[at] for name, own in columns.items() if own[at] is not None} for at in ends]


@lru_cache(maxsize=4096)
def read_samples(store: TrajectoryStore, step: int, _written_at: int) -> dict[str, Any]:
    """Rewards and lengths of a step, of at most `SAMPLES_OF_STEP` samples, evenly spread. Pairs have no rewards of this
    kind."""
    found = store.summaries(step, names=(*SAMPLE_COLUMNS, "is_chosen"))
    own = [one for one in found if one["reward"] is not None and one.get("is_chosen") is None]
    own = own[:: -(-len(own) // SAMPLES_OF_STEP) or 1]
    return {"step": step, **{name: [one[name] for one in own] for name in ("index", *SAMPLE_COLUMNS)}}


def score(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The held-out score of a validation, or its loss where nothing is generated."""
    kind, value = (
        ("loss", metrics.get("validation/loss"))
        if held_out_score(metrics) is None
        else ("score", held_out_score(metrics))
    )
    return {
        "kind": kind,
        "value": value,
        **{name: metrics.get(f"validation/{name}") for name in ("ci95", "min", "max")},
    }


def thinned(values: Sequence[float]) -> list[float]:
    """At most SPARKLINE_POINTS of them, evenly, with the last."""
    every = max(1, -(-len(values) // SPARKLINE_POINTS))
    return list(values[::-1][::every][::-1])


def preview(value: Any) -> Any:
    return value[:PREVIEW_CHARS] + "…" if isinstance(value, str) and len(value) > PREVIEW_CHARS else value


def tail_lines(path: Path | None, num_bytes: int = TAIL_BYTES) -> list[str]:
    """The last lines of a file, as many as are in so many bytes."""
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read(num_bytes).decode(errors="replace").splitlines()
    except OSError:
        return []
