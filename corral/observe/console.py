"""What a person sees while a run is going on, and the run's log file.

On a terminal: a progress bar over the steps, and under it what is being done right now. Elsewhere (a pipe, a log file,
a batch job): plain lines, and a sign of life every ten seconds or so. Colors, widths and NO_COLOR are left to rich.
Corral's modules warn through `logging`: `run_log` sends that to the console, and everything else to `logs/main.log`.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from corral.observe.console_lines import (
    STEP_FIELDS,
    EnvironmentScore,
    cut,
    duration,
    environment_scores,
    percent,
    score_text,
    step_line,
    validation_line,
    visible,
)

PLAIN_WIDTH = 120
LINE_EVERY_S = 10.0
STEPS_FOR_ETA = 20


@dataclass(frozen=True)
class ShownSample:
    """A response of the model, to be shown."""

    prompt: str
    response: str
    answer: str
    reward: float


class Console:
    """Also a `Tracker` that prints a line for each step. It must be closed, whatever happens: a live display hides the
    cursor."""

    def __init__(
        self, stream: IO[str] | None = None, clock: Callable[[], float] = time.monotonic, *, live: bool = True
    ) -> None:
        """`live`: with a progress bar, if it is a terminal. Not where something else writes there too, as a
        debugger."""
        stream = stream or sys.stdout
        is_terminal = stream.isatty()
        self._rich = RichConsole(
            file=cast(IO[str], UnbreakableStream(stream)),
            width=None if is_terminal else PLAIN_WIDTH,
            highlight=False,
            emoji=False,
        )
        self._is_live = live and is_terminal and self._rich.is_interactive
        self._clock = clock
        self._last_line_at = clock()
        self._total: int | None = None
        self._columns: set[str] = set()
        self._ends: deque[tuple[int, float]] = deque(maxlen=STEPS_FOR_ETA + 1)
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def banner(self, run: str, folder: Path, model: str, plan: Sequence[str], resumed_at: int | None = None) -> None:
        self._rows(
            {
                "run": run if resumed_at is None else f"{run}, resumed after step {resumed_at}",
                "folder": str(folder),
                "model": model,
                "plan": "\n".join(plan),
            }
        )
        self._print("")

    def begin(self, total: int, done: int = 0) -> None:
        """Starts the progress bar of training. `done` of `total` steps were made before, by the run that is resumed."""
        self._total = total
        self._ends.append((done, self._clock()))
        if self._is_live:
            self._bar = self._live().add_task("training", total=total, completed=done, note=f"{done}/{total}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line of a step. A row without any number of a step, such as that of a validation, has none."""
        if not any(field.key in metrics for field in STEP_FIELDS):
            return
        self._ends.append((step, self._clock()))
        eta_s = self._eta_s()
        shown = {**metrics, **({} if eta_s is None else {"eta_s": eta_s})}
        self._print(step_line(step, self._total, shown, self._columns, self._rich.width if self._is_live else None))
        self._columns |= shown.keys()
        if self._progress is not None and self._bar is not None:
            eta = "" if eta_s is None else f"  eta {duration(eta_s)}"
            self._progress.update(self._bar, completed=step, note=f"{step}/{self._total}{eta}")

    def state(self) -> dict[str, str]:
        return {}

    def _eta_s(self) -> float | None:
        """Measured by the clock over the last steps, so that validation and checkpoints between them count too."""
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        if self._total is None or last <= first:
            return None
        return (self._total - last) * (end - start) / (last - first)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator["ConsoleStage"]:
        """Shows that `name` ("loading model", "rollout") is being done, until the block ends."""
        stage = ConsoleStage(self, name, total)
        if self._is_live:
            stage.task = self._live().add_task(name, total=total, note="")
        elif self._total is None:
            self._print(f"{name} ...")  # within a step that would be a line too many
        try:
            yield stage
        finally:
            if self._progress is not None and stage.task is not None:
                self._progress.remove_task(stage.task)
                self._stop_if_idle()

    def _show(self, stage: "ConsoleStage") -> None:
        if self._progress is not None and stage.task is not None:
            self._progress.update(stage.task, completed=stage.done, total=stage.total, note=stage.count)
        elif self._clock() - self._last_line_at >= LINE_EVERY_S:
            self._print(f"{stage.name} {stage.count}")

    def _live(self) -> Progress:
        if self._progress is None:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                console=self._rich,
                transient=True,
                refresh_per_second=4,
            )
            self._progress.start()
        return self._progress

    def _stop_if_idle(self) -> None:
        if self._progress is not None and not self._progress.tasks:
            self._progress.stop()
            self._progress = None

    def validation(
        self, when: str, metrics: Mapping[str, float], num_questions: int | None = None, noun: str = "question"
    ) -> None:
        """Prints the score of a validation. `when`: "before training", "after step 20"."""
        self._print(Text(validation_line(when, metrics, num_questions, noun), "bold"))
        scores = environment_scores(metrics)
        if scores:
            self._print(environment_table(scores))

    def samples(self, samples: Sequence[ShownSample], title: str = "") -> None:
        """Prints a table. Of a long prompt the end is shown, of a long response both ends: the question and the answer
        are there."""
        if not samples:
            return
        rewards = [f"{sample.reward:g}" for sample in samples]
        answers = [cut(visible(sample.answer), 16, "start") for sample in samples]
        fixed = max(6, *map(len, rewards)) + max(6, *map(cell_len, answers))
        room = max(self._rich.width - fixed - 6, 16)
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for name in ("prompt", "response", "answer"):
            table.add_column(name, no_wrap=True)
        table.add_column("reward", justify="right", no_wrap=True)
        for sample, answer, reward in zip(samples, answers, rewards, strict=True):
            prompt = cut(visible(sample.prompt), 2 * room // 5, "end")
            response = cut(visible(sample.response), room - 2 * room // 5, "both")
            table.add_row(Text(prompt, "dim"), Text(response), Text(answer), Text(reward))
        if title:
            self._print(Text(title, "bold"))
        self._print(table)

    def note(self, message: str) -> None:
        self._print(Text(message, "dim"))

    def warn(self, message: str) -> None:
        self._print(Text.assemble(("warning: ", "bold yellow"), (message, "yellow")))

    def summary(
        self,
        folder: Path,
        before: Mapping[str, float] | None = None,
        after: Mapping[str, float] | None = None,
        curve: Path | None = None,
        commands: Mapping[str, str] | None = None,
    ) -> None:
        """Prints the end of a run. `commands`: what to do next, such as {"evaluate": "corral evaluate ..."}."""
        scores = [score_text(metrics) for metrics in (before, after) if metrics is not None]
        self._print("")
        self._rows(
            {
                "validation": " -> ".join(scores),
                "folder": str(folder),
                "curve": "" if curve is None else str(curve),
                **(commands or {}),
            }
        )

    def close(self) -> None:
        """Removes the progress bar; lines can still be printed."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows(self, rows: Mapping[str, str]) -> None:
        """Prints `name  text`, aligned; a row with an empty text is left out."""
        rows = {name: text for name, text in rows.items() if text}
        width = max(map(len, rows), default=0)
        for name, text in rows.items():
            for number, line in enumerate(text.splitlines()):
                self._print(Text.assemble((("" if number else name).ljust(width), "bold cyan"), "  ", line))

    def _print(self, line: str | Text | Table) -> None:
        self._last_line_at = self._clock()
        self._rich.print(line, soft_wrap=not isinstance(line, Table), markup=False)


@dataclass
class ConsoleStage:
    """Work in progress; made by `Console.stage`."""

    console: Console
    name: str
    total: int | None
    done: int = 0
    task: TaskID | None = None

    def update(self, done: int, total: int | None = None) -> None:
        self.done = done
        self.total = total or self.total
        self.console._show(self)

    @property
    def count(self) -> str:
        return f"{self.done}/{self.total}" if self.total else f"{self.done}"


def environment_table(scores: Sequence[EnvironmentScore]) -> Table:
    """Success between the random and optimal baselines, and all else that the environments measured."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    names = sorted({name for score in scores for name in score.measured} - {"success", "reward"})
    with_success = any("success" in score.measured for score in scores)
    if any(score.tag for score in scores):
        table.add_column("environment", no_wrap=True)
    for name in (*(("success", "random", "optimal") if with_success else ()), *names):
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for score in scores:
        cells = [score.tag] if score.tag else []
        if with_success:
            found = (score.measured.get("success"), score.random.get("success"), score.optimal.get("success"))
            cells += ["" if share is None else percent(share) for share in found]
        cells += [f"{score.measured[name]:.3g}" if name in score.measured else "" for name in names]
        table.add_row(*cells)
    return table


class UnbreakableStream:
    """Passes text on to `stream` for as long as that can be written to.

    A run must outlive its terminal: when the reader of a pipe is gone or the terminal was closed, the text is dropped
    (rich would end the process). Characters that the stream's encoding does not have are written as `?`.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_broken = False

    def write(self, text: str) -> int:
        if not self._is_broken:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            try:
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
            except (OSError, ValueError):  # ValueError: the stream is closed
                self._is_broken = True
        return len(text)

    def flush(self) -> None:
        if not self._is_broken:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._is_broken = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def run_log(path: Path, console: Console) -> Iterator[None]:
    """Logs everything to `path`, and Corral's warnings to the console, until the block ends. What libraries log
    (transformers, httpx, Python's `warnings`) is in the file only."""
    root, ours = logging.getLogger(), logging.getLogger("corral")
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    to_file.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z")
    )
    to_console = _ConsoleHandler(console)
    level = ours.level
    quiet_libraries()
    root.addHandler(to_file)
    ours.addHandler(to_console)
    ours.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        ours.setLevel(level)
        ours.removeHandler(to_console)
        root.removeHandler(to_file)
        to_file.close()


def quiet_libraries() -> None:
    """Sends the records of every library that was imported so far to the root logger instead of the terminal. Some set
    up a handler of their own when they are imported (transformers does), so this is called again after an import in the
    middle of a run."""
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in [logging.root, *loggers]:
        for handler in [handler for handler in logger.handlers if _writes_to_terminal(handler)]:
            logger.removeHandler(handler)
            logger.propagate = True
    transformers = sys.modules.get("transformers.utils.logging")
    if transformers is not None:
        transformers.disable_progress_bar()


def _writes_to_terminal(handler: logging.Handler) -> bool:
    if not isinstance(handler, logging.StreamHandler) or isinstance(handler, logging.FileHandler):
        return False
    return handler.stream in (sys.stdout, sys.stderr) or getattr(handler.stream, "name", "") in ("<stdout>", "<stderr>")


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.warn(record.getMessage())
