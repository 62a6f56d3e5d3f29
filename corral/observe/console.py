"""What a person sees while a run is going on, and the run's log file.

On a terminal: a progress bar over the steps, and under it what is being done right now. Elsewhere (a pipe, a log file,
a batch job): plain lines, those of progress with the time of day, and a sign of life every ten seconds or so. In a
notebook: one display with all of that, which is updated. Colors, widths and NO_COLOR are left to rich.
Corral's modules warn through `logging`: `run_log` sends that to the console, and everything else to `logs/main.log`.
"""

import io
import logging
import math
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self, cast

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from corral.observe.notebook import run_html
from corral.observe.run_files import Tracker
from corral.recipe.errors import first_line, without_controls

PLAIN_WIDTH = 120
LINE_EVERY_S = 10.0
SIGN_OF_LIFE_S = 30.0
"""After so many seconds without a line there is one that says what is being done."""
REFRESH_EVERY_S = 0.25
STEPS_FOR_ETA = 20
CURVES = ("reward/mean", "policy/nll", "preference/loss")
ENDED_BY = "ended_by"
"""Logger of the error that ends a run. Not below `corral`: the command line prints the error itself."""


@dataclass(frozen=True)
class ShownSample:
    """A response of the model, to be shown."""

    prompt: str
    response: str
    answer: str
    reward: float | None


class Console(Tracker):
    """Also a tracker that prints a line for each step. It must be closed, whatever happens: a live display hides the
    cursor."""

    def __init__(
        self,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        live: bool = True,
        warnings: IO[str] | None = None,
        show: Callable[[str], None] | None = None,
    ) -> None:
        """`live`: with a progress bar, if it is a terminal. Not where something else writes there too, as a
        debugger. `warnings`: where these are printed as well, if `stream` is not looked at. `show`: shows HTML in a
        notebook, in place of what it has shown before; nothing is printed then."""
        self._show_html, self._lines, self._shown_at = show, io.StringIO(), -math.inf
        stream = self._lines if show is not None else stream or sys.stdout
        is_terminal = stream.isatty()
        self._rich = RichConsole(
            file=cast(IO[str], UnbreakableStream(stream)),
            width=None if is_terminal else PLAIN_WIDTH,
            force_jupyter=False,
            force_terminal=None if show is None else False,
            highlight=False,
            emoji=False,
        )
        self._is_terminal = is_terminal
        self._is_live = live and is_terminal and self._rich.is_interactive
        self._clock, self._warnings = clock, warnings
        self._last_line_at = clock()
        self._total: int | None = None
        self._title = ""
        self._columns: set[str] = set()
        self._curve: dict[str, list[float]] = {}
        """Values of each of `CURVES`."""
        self._ends: deque[tuple[int, float]] = deque(maxlen=STEPS_FOR_ETA + 1)
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        self._stages: list[ConsoleStage] = []

    def banner(self, run: str, folder: Path, model: str, plan: Sequence[str], resumed_at: int | None = None) -> None:
        self._title = run if resumed_at is None else f"{run}, resumed after step {resumed_at}"
        if self._is_terminal:
            width = max(self._rich.width - len("folder  "), PLAIN_WIDTH // 4)
            plan = [
                part
                for line in plan
                for part in textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)
            ]
        self._rows({"run": self._title, "folder": str(folder), "model": model, "plan": "\n".join(plan)})
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
        for name in CURVES:
            if name in metrics:
                self._curve.setdefault(name, []).append(metrics[name])
        eta_s = self._eta_s()
        shown = {**metrics, **({} if eta_s is None else {"eta_s": eta_s})}
        width = self._rich.width if self._is_live else None
        self._print_timed(step_line(step, self._total, shown, self._columns, width))
        self._columns |= shown.keys()
        if self._progress is not None and self._bar is not None:
            eta = "" if eta_s is None else f"  eta {duration(eta_s)}"
            self._progress.update(self._bar, completed=step, note=f"{step}/{self._total}{eta}")

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
        self._stages.append(stage)
        try:
            yield stage
        finally:
            self._stages.remove(stage)
            if self._progress is not None and stage.task is not None:
                self._progress.remove_task(stage.task)
                self._stop_if_idle()

    @contextmanager
    def signs_of_life(self, ended: threading.Event | None = None) -> Iterator[None]:
        """Prints what is being done when nothing was printed for half a minute, for the time of the block: workers may
        take minutes to start, and what hangs prints nothing. On a terminal the progress bar shows it, or a debugger
        waits there. `ended` is set at the end; until then time passes in its `wait`."""
        ended = ended or threading.Event()
        if not self._is_terminal:
            threading.Thread(target=self._report_silence, args=(ended,), name="signs of life", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _report_silence(self, ended: threading.Event) -> None:
        own_line_at, silent_since = -math.inf, 0.0
        while not ended.wait(max(SIGN_OF_LIFE_S / 30, self._last_line_at + SIGN_OF_LIFE_S - self._clock())):
            if self._last_line_at != own_line_at:
                silent_since = self._last_line_at
            if self._clock() - self._last_line_at >= SIGN_OF_LIFE_S:
                self._print_timed(f"{self._doing} (nothing new for {duration(self._clock() - silent_since)})")
                own_line_at = self._last_line_at

    @property
    def _doing(self) -> str:
        if self._stages:
            return self._stages[-1].text
        if self._total is None:
            return "starting"
        step = self._ends[-1][0] + 1
        return f"step {step}/{self._total}" if step <= self._total else "ending the run"

    def _show(self, stage: "ConsoleStage") -> None:
        if stage not in self._stages:
            return  # what was cancelled may still report itself
        if self._progress is not None and stage.task is not None:
            self._progress.update(stage.task, completed=stage.done, total=stage.total, note=stage.count)
        elif self._clock() - self._last_line_at >= LINE_EVERY_S:
            self._print_timed(stage.text)
        else:
            self._refresh()

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

    def samples(self, samples: Sequence[ShownSample]) -> None:
        """Prints a table. Of a long prompt the end is shown, of a long response both ends: the question and the answer
        are there."""
        if not samples:
            return
        rewards = ["none" if sample.reward is None else f"{sample.reward:g}" for sample in samples]
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
        self._print(table)

    def note(self, message: str) -> None:
        self._print(Text(without_controls(message), "dim"))

    def warn(self, message: str) -> None:
        message = without_controls(message)
        self._print(Text.assemble(("warning: ", "bold yellow"), (message, "yellow")))
        if self._warnings is not None:
            print(f"warning: {message}", file=self._warnings)

    def summary(
        self,
        folder: Path,
        before: Mapping[str, float] | None = None,
        after: Mapping[str, float] | None = None,
        curve: Path | None = None,
        commands: Mapping[str, str] | None = None,
        training: str = "",
        prints: str = "",
    ) -> None:
        """Prints the end of a run. `commands`: what to do next, such as {"evaluate": "corral evaluate ..."}.
        `training`: what has become of the reward. `prints`: how much rewards and environments have printed."""
        scores = [score_text(metrics) for metrics in (before, after) if metrics is not None]
        self._print("")
        self._rows(
            {
                "training": training,
                "validation": " -> ".join(scores),
                "folder": str(folder),
                "curve": "" if curve is None else str(curve),
                "prints": prints,
                **(commands or {}),
            }
        )

    def close(self) -> None:
        """Removes the progress bar; lines can still be printed."""
        self._refresh(always=True)
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

    def _print_timed(self, line: str | Text) -> None:
        """Prints a line of progress: where it may be read later, with the time of day."""
        self._print(line if self._is_terminal else Text.assemble((time.strftime("%X  "), "dim"), line))

    def _print(self, line: str | Text | Table) -> None:
        self._last_line_at = self._clock()
        self._rich.print(line, soft_wrap=not isinstance(line, Table), markup=False)
        self._refresh()

    def _refresh(self, always: bool = False) -> None:
        """Updates the display of a notebook, now and then."""
        if self._show_html is None or (not always and self._clock() - self._shown_at < REFRESH_EVERY_S):
            return
        self._shown_at = self._clock()
        step = self._ends[-1][0] if self._ends else 0
        name = next(iter(self._curve), "")
        title = ": ".join(filter(None, [self._title, *([self._stages[-1].text] if self._stages else [])]))
        lines = self._lines.getvalue().splitlines()
        self._show_html(run_html(title, step, self._total, name, self._curve.get(name, []), lines))


@dataclass
class ConsoleStage:
    """Work in progress; made by `Console.stage`."""

    console: Console
    name: str
    total: int | None
    done: int = 0
    task: TaskID | None = None
    num_tokens: int = 0
    """Generated so far, where that is known."""

    def update(self, done: int, total: int | None = None, num_tokens: int = 0) -> None:
        self.done, self.num_tokens = done, num_tokens
        self.total = total or self.total
        self.console._show(self)

    @property
    def count(self) -> str:
        tokens = f", {self.num_tokens:,} tokens" if self.num_tokens else ""
        return f"{self.done}/{self.total}{tokens}" if self.total else f"{self.done}{tokens}"

    @property
    def text(self) -> str:
        return f"{self.name} {self.count}" if self.total else self.name


class UnbreakableStream:
    """Passes text on to `stream` for as long as that can be written to.

    A run must outlive its terminal: when the reader of a pipe is gone or the terminal was closed, the text is dropped
    (rich would end the process). Characters that the stream's encoding does not have are written as `?`.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_broken = False

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._try(lambda: self._stream.write(text.encode(encoding, "replace").decode(encoding)))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, use_stream: Callable[[], object]) -> None:
        if not self._is_broken:
            try:
                use_stream()
            except (OSError, ValueError):  # ValueError: the stream is closed
                self._is_broken = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def run_log(path: Path, console: Console) -> Iterator[None]:
    """Logs everything to `path`, and Corral's warnings to the console, until the block ends. What libraries log
    (transformers, httpx, Python's `warnings`) is in the file only."""
    root, ours = logging.getLogger(), logging.getLogger("corral")
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = _LogFile(path, console)
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
    except Exception as error:  # its last line says why a run failed, to who has not seen the terminal
        logging.getLogger(ENDED_BY).error("%s", without_controls(first_line(error)))
        raise
    finally:
        logging.captureWarnings(False)
        ours.setLevel(level)
        ours.removeHandler(to_console)
        root.removeHandler(to_file)
        to_file.close()


class _LogFile(logging.FileHandler):
    """The run's log. Where it cannot be written, on a full disk for example, that is one warning: `logging` would print
    a traceback for every record, and the end of the run would be the log's and not its own."""

    def __init__(self, path: Path, console: Console) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.console, self.has_warned = console, False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_warned:
            self.has_warned = True
            self.console.warn(f"{self.baseFilename} cannot be written: {error.strerror}")

    def close(self) -> None:
        with suppress(OSError):
            super().close()


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


# --- lines: pure functions from numbers to text


def duration(seconds: float) -> str:
    """45s, 3m20s, 2h05m, 3d04h."""
    if not math.isfinite(seconds):
        return "?"
    total = round(max(seconds, 0.0))
    for large, unit, small, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if total >= large:
            return f"{total // large}{unit}{total % large // small:02d}{part}"
    return f"{total}s"


def short_duration(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 59.95 else duration(seconds)


def small_number(value: float) -> str:
    """0.0012, and 3.4e-05 where that would read as zero."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"


@dataclass(frozen=True)
class StepField:
    """A metric in the line of a step. `importance`: the lowest are left out first where the terminal is narrow."""

    key: str
    label: str
    width: int
    write: Callable[[float], str]
    importance: int
    unit: str = ""

    def text(self, value: float | None) -> Text:
        """As wide for every value, and for none, so that lines align."""
        if value is None:
            return Text(" " * self.cells)
        label = f"{self.label} " if self.label else ""
        return Text.assemble((label, "dim"), self.write(value).rjust(self.width), (self.unit, "dim"))

    @property
    def cells(self) -> int:
        return len(self.label) + bool(self.label) + self.width + len(self.unit)


STEP_FIELDS = (
    StepField("reward/mean", "reward", 6, "{:.3f}".format, 9),
    StepField("policy/nll", "loss", 6, small_number, 9),
    StepField("preference/loss", "loss", 6, small_number, 9),
    StepField("preference/accuracy", "accuracy", 7, "{:.1%}".format, 9),
    StepField("preference/margin", "margin", 8, small_number, 5),
    StepField("kl/mean", "kl", 8, small_number, 5),
    StepField("policy/entropy", "entropy", 5, "{:.2f}".format, 4),
    StepField("length/mean", "length", 7, "{:.1f}".format, 3),
    StepField("speed/tokens_per_s", "", 6, "{:.0f}".format, 2, " tok/s"),
    StepField("time/rollout_s", "rollout", 6, short_duration, 0),
    StepField("time/train_s", "train", 6, short_duration, 1),
    StepField("time/step_s", "step", 6, short_duration, 7),
    StepField("eta_s", "eta", 6, duration, 8),
)
TROUBLE_FIELDS = (
    StepField("samples/error_rate", "failed", 0, "{:.0%}".format, 9),
    StepField("updates/skipped", "skipped updates", 0, "{:.0f}".format, 9),
    StepField("samples/dropped", "dropped samples", 0, "{:.0f}".format, 9),
    StepField("samples/dropped_groups", "dropped groups", 0, "{:.0f}".format, 9),
)


def step_line(step: int, total: int | None, metrics: Mapping[str, float], columns: set[str], width: int | None) -> Text:
    """The line of a step. `columns` are the metrics that earlier lines showed: their columns are kept."""
    count = f"{step}" if total is None else f"{step:>{len(str(total))}}/{total}"
    head = Text.assemble(("step ", "dim"), (count, "bold"))
    fields = [field for field in STEP_FIELDS if field.key in metrics or field.key in columns]
    troubles = [field.text(metrics[field.key]) for field in TROUBLE_FIELDS if metrics.get(field.key)]
    for text in troubles:
        text.stylize("yellow")
    if width is not None:
        while fields and head.cell_len + sum(field.cells + 2 for field in fields) > width:
            fields.remove(min(fields, key=lambda field: field.importance))
    line = Text("  ").join([head, *(field.text(metrics.get(field.key)) for field in fields), *troubles])
    line.rstrip()
    return line


def validation_line(when: str, metrics: Mapping[str, float], num_questions: int | None, noun: str = "question") -> str:
    """validation before training: 31.0 % ± 4.1 (200 questions)"""
    parts = [f"validation {when}: {score_text(metrics)}"]
    pass_at = [name for name in sorted(metrics) if name.startswith("validation/pass@") and name != "validation/pass@1"]
    parts += [f"{name.removeprefix('validation/')} {percent(metrics[name])}" for name in pass_at]
    if num_questions is not None:
        parts[-1] += f" ({num_questions} {noun}{'s' if num_questions != 1 else ''})"
    if rate := metrics.get("validation/error_rate"):
        parts.append(f"{percent(rate)} of the samples failed")
    return ", ".join(parts)


@dataclass(frozen=True)
class EnvironmentScore:
    """The scores of an environment in a validation."""

    tag: str
    measured: Mapping[str, float]
    """Means of `success`, `valid_actions`, ..."""
    random: Mapping[str, float]
    """Reward and success of the random baseline."""
    optimal: Mapping[str, float]
    """Reward and success of the optimal baseline."""


def environment_scores(metrics: Mapping[str, float]) -> list[EnvironmentScore]:
    """One for each tag, or for the only environment; none where environments measure nothing."""
    measured, random, optimal = (
        {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        for prefix in ("validation/environment/", "validation/random/", "validation/optimal/")
    )
    ends = ("/reward", "/turns", "/length")  # which every tag has, see `environment_metrics`
    named = {name.removesuffix(ends[0]) for name in measured if name.endswith(ends[0])}
    tags = sorted(tag for tag in named if all(f"{tag}{end}" in measured for end in ends))

    def below(numbers: Mapping[str, float], tag: str) -> dict[str, float]:
        prefix = f"{tag}/" if tag else ""
        own = {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}
        return {name: value for name, value in own.items() if "/" not in name}

    found = [
        EnvironmentScore(tag, below(measured, tag), below(random, tag), below(optimal, tag)) for tag in tags or [""]
    ]
    return [score for score in found if score.measured]


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


def score_text(metrics: Mapping[str, float | None]) -> str:
    """31.0 % ± 4.1; a plain number where a reward is outside of [0, 1]. Where a loss was computed on held-out
    rows: loss 0.4311, or both, 31.0 % ± 4.1 and loss 0.4311; and in how many pairs the chosen answer is ahead."""
    score, loss = held_out_score(metrics), metrics.get("validation/loss")
    if loss is not None:
        score_alone = {name: value for name, value in metrics.items() if name != "validation/loss"}
        text = f"loss {loss:.4f}" if score is None else f"{score_text(score_alone)} and loss {loss:.4f}"
        accuracy = metrics.get("validation/accuracy")
        return text if accuracy is None else f"{text}, accuracy {percent(accuracy)}"
    if score is None:
        return "no score"
    interval = metrics.get("validation/ci95")
    scale, unit, digits = (100, " %", 1) if is_fraction(metrics) else (1, "", 3)
    text = f"{scale * score:.{digits}f}{unit}"
    return text if interval is None else f"{text} ± {scale * interval:.{digits}f}"


def is_fraction(metrics: Mapping[str, float | None]) -> bool:
    """Whether the held-out score is one of something: all its rewards are between 0 and 1. Of rows of earlier releases
    only their mean is known."""
    score = held_out_score(metrics)
    ends = [metrics.get(f"validation/{end}", score) for end in ("min", "max")]
    return all(end is not None and 0 <= end <= 1 for end in ends)


def is_validation(metrics: Mapping[str, Any]) -> bool:
    return held_out_score(metrics) is not None or "validation/loss" in metrics


def held_out_score(metrics: Mapping[str, float | None]) -> float | None:
    """`validation/mean@k`, whichever k."""
    name = min((name for name in metrics if name.startswith("validation/mean@")), default=None)
    return None if name is None else metrics[name]


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def visible(text: str) -> str:
    """The text on one line: line breaks as ⏎, and what could move the cursor or color the terminal as its code."""
    return without_controls(text.replace("\r\n", "\n").replace("\n", "⏎").replace("\t", " "))


def cut(text: str, width: int, keep: Literal["start", "end", "both"]) -> str:
    """The text cut to `width` cells; `…` stands for what was cut."""
    if cell_len(text) <= width:
        return text
    if width < 1:
        return ""
    start = {"start": width - 1, "end": 0, "both": (width - 1) // 2}[keep]
    return _first_cells(text, start) + "…" + _first_cells(text[::-1], width - 1 - start)[::-1]


def _first_cells(text: str, width: int) -> str:
    end = used = 0
    while end < len(text) and used + cell_len(text[end]) <= width:
        used += cell_len(text[end])
        end += 1
    return text[:end]
