"""On a real terminal (a pty) and without one."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from deadlines import within

from corral.observe.console import Console, ShownSample
from corral.observe.curve import describe_training

ROW = {"reward/mean": 0.5, "time/step_s": 4.0}
RUN = """
from pathlib import Path
from corral.observe.console import Console, ShownSample
console = Console()
console.banner("addition", Path("runs/addition"), "tiny", ["4 prompts x 2 samples = 8 trajectories"])
with console.stage("loading model"):
    pass
console.begin(3)
for step in (1, 2, 3):
    with console.stage("playing", 8) as stage:
        stage.update(4)
    console.log(step, {"reward/mean": 0.5, "kl/mean": 0.001, "policy/entropy": 1.0, "length/mean": 9.0})
console.warn("watch out")
console.validation("after training", {"validation/mean@1": 0.31, "validation/ci95": 0.041}, 200)
console.samples([ShownSample("What is 1 + 1?" * 9, "It is\\n\\x1b[31m" * 9 + "2", "2", 1.0)])
console.close()
console.summary(Path("runs/addition"))
"""


def on_terminal(program: str, width: int, **environment: str) -> str:
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    clean = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", program]
    environment = {**clean, "TERM": "xterm-256color", **environment}
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment) as process:
        os.close(child)
        output = b""
        while chunk := _read(parent):
            output += chunk
        os.close(parent)
    assert process.returncode == 0, output.decode()
    return output.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # how Linux says that the other end is closed
        return b""


def off_terminal(program: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        timeout=within(30),
        check=True,
    )
    return result.stdout.decode()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def console(stream: io.StringIO, clock: Clock) -> Console:
    return Console(stream, clock)


def without_times(stream: io.StringIO) -> list[str]:
    return [re.sub(r"^\d\d:\d\d:\d\d  ", "", line) for line in stream.getvalue().splitlines()]


def test_without_a_terminal_there_are_only_plain_lines() -> None:
    output = off_terminal(RUN)
    assert "\x1b" not in output
    assert "\r" not in output
    assert len(re.findall(r"^\d\d:\d\d:\d\d  step \d/3  reward", output, re.MULTILINE)) == 3


def test_without_a_terminal_forced_colours_bring_no_progress_bar() -> None:
    output = off_terminal(RUN, FORCE_COLOR="1")
    assert "\x1b[" in output
    assert "\x1b[?25l" not in output  # hides the cursor, as a live display does


def test_on_a_terminal_there_is_a_progress_bar_with_the_stage_under_it() -> None:
    output = on_terminal(RUN, 120)
    assert "training" in output
    assert "playing" in output
    assert "\x1b[?25h" in output  # the cursor is shown again


def test_no_color_is_respected_on_a_terminal() -> None:
    colours = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
    assert colours.search(on_terminal(RUN, 120))
    assert not colours.search(on_terminal(RUN, 120, NO_COLOR="1"))


def test_a_dumb_terminal_gets_plain_lines() -> None:
    assert "\x1b" not in on_terminal(RUN, 120, TERM="dumb")


def test_step_lines_fit_a_narrow_terminal() -> None:
    output = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", on_terminal(RUN, 40))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", output) if line.startswith("step ")]
    assert len(lines) == 3
    assert all(len(line) <= 40 for line in lines)


def test_signs_that_the_terminal_cannot_show_are_replaced() -> None:
    assert "31.0 % ? 4.1" in off_terminal(RUN, PYTHONIOENCODING="ascii")


def test_a_run_outlives_the_reader_of_its_pipe(tmp_path: Path) -> None:
    program = RUN + f"\nPath({str(tmp_path / 'end')!r}).touch()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
    assert (tmp_path / "end").exists()


def test_the_banner_says_what_runs_where(console: Console, stream: io.StringIO) -> None:
    console.banner("addition", Path("runs/addition"), "tiny", ["first line", "  second line"], resumed_at=30)
    assert stream.getvalue() == (
        "run     addition, resumed after step 30\n"
        "folder  runs/addition\n"
        "model   tiny\n"
        "plan    first line\n"
        "          second line\n\n"
    )


def test_the_time_left_follows_the_clock(console: Console, stream: io.StringIO, clock: Clock) -> None:
    console.begin(60, done=50)
    clock.now_s = 20
    console.log(51, ROW)
    assert stream.getvalue().strip().endswith("eta  3m00s")


def test_a_row_of_a_validation_has_no_step_line(console: Console, stream: io.StringIO) -> None:
    console.log(0, {"validation/mean@1": 0.3})
    assert stream.getvalue() == ""


def test_a_stage_before_training_is_announced(console: Console, stream: io.StringIO) -> None:
    with console.stage("loading model"):
        assert stream.getvalue() == "loading model ...\n"


def test_a_long_stage_gives_a_sign_of_life_every_ten_seconds(
    console: Console, stream: io.StringIO, clock: Clock
) -> None:
    console.begin(60)
    with console.stage("playing", 128) as stage:
        for done in range(26):
            clock.now_s += 1
            stage.update(done, num_tokens=1000 * done)
    assert without_times(stream) == ["playing 9/128, 9,000 tokens", "playing 19/128, 19,000 tokens"]


def test_samples_show_line_breaks_and_neither_markup_nor_control_codes(console: Console, stream: io.StringIO) -> None:
    console.samples([ShownSample("[red]1 + 1[/red]?", "It is\n\x1b[31m2", "2", 1.0)])
    header, row = stream.getvalue().splitlines()
    assert header.split() == ["prompt", "response", "answer", "reward"]
    assert re.split(r"\s{2,}", row.strip()) == ["[red]1 + 1[/red]?", "It is⏎\\x1b[31m2", "2", "1"]


def test_long_samples_are_cut_to_the_width(console: Console, stream: io.StringIO) -> None:
    console.samples([ShownSample("question " * 99 + "end?", "begin " + "so " * 999 + "done", "42" * 99, -0.25)])
    row = stream.getvalue().splitlines()[-1]
    assert len(row) <= 120
    assert "end?" in row
    assert "begin" in row
    assert "done" in row


def test_warnings_are_printed_as_they_are(console: Console, stream: io.StringIO) -> None:
    console.warn("[bold]odd[/bold] " + "word " * 50)
    assert stream.getvalue().startswith("warning: [bold]odd[/bold] word")
    assert stream.getvalue().count("\n") == 1


def test_the_summary_has_the_change_and_what_to_do_next(console: Console, stream: io.StringIO) -> None:
    before, after = {"validation/mean@1": 0.31}, {"validation/mean@1": 0.585, "validation/ci95": 0.04}
    commands = {"evaluate": "corral evaluate runs/addition"}
    training = describe_training([{"step": step, "reward/mean": step / 10} for step in range(1, 5)])
    console.summary(Path("runs/addition"), before, after, Path("runs/addition/curve.png"), commands, training)
    assert stream.getvalue() == (
        "\n"
        "training    reward 0.100 -> 0.400 (first and last of 4 steps)\n"
        "validation  31.0 % -> 58.5 % ± 4.0\n"
        "folder      runs/addition\n"
        "curve       runs/addition/curve.png\n"
        "evaluate    corral evaluate runs/addition\n"
    )


class Passing(threading.Event):
    """Time passes while somebody waits, two minutes in all; `each_second` is called meanwhile."""

    def __init__(self, clock: Clock, each_second: Callable[[], object] = bool) -> None:
        super().__init__()
        self.clock, self.each_second, self.is_over = clock, each_second, threading.Event()

    def wait(self, timeout_s: float | None = None) -> bool:
        for _ in range(round(timeout_s or 0)):
            self.clock.now_s += 1
            self.each_second()
        if self.clock.now_s < 120:
            return False
        self.is_over.set()
        return super().wait()


def test_a_long_silence_is_broken_by_what_is_being_done(console: Console, stream: io.StringIO, clock: Clock) -> None:
    passing = Passing(clock)
    with console.stage("starting workers"), console.signs_of_life(passing):
        assert passing.is_over.wait(within(30))
    lines = [f"starting workers (nothing new for {silence})" for silence in ("30s", "1m00s", "1m30s")]
    assert without_times(stream) == ["starting workers ...", *lines]
    for thread in threading.enumerate():
        if thread.name == "signs of life":
            thread.join(within(30))
            assert not thread.is_alive()


def test_after_the_last_step_no_further_one_is_waited_for(console: Console, stream: io.StringIO, clock: Clock) -> None:
    console.begin(3, done=3)
    passing = Passing(clock)
    with console.signs_of_life(passing):
        assert passing.is_over.wait(within(30))
    assert without_times(stream)[0] == "ending the run (nothing new for 30s)"


def test_what_was_cancelled_may_report_progress_after_its_stage(stream: io.StringIO, clock: Clock) -> None:
    """On a terminal: what finishes late updates no bar that is gone."""
    late = RUN.replace("console.close()", "stage.update(8)\nconsole.close()")
    assert "playing" in on_terminal(late, 120)


def test_the_head_of_a_run_is_wrapped_between_words() -> None:
    plan = "4 prompts x 2 samples = 8 trajectories -> 1 update of 8 on 1 trainer, up to 16384 tokens per micro-batch"
    output = on_terminal(RUN.replace("4 prompts x 2 samples = 8 trajectories", plan), 60)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).splitlines()
    assert lines[3] == "plan    4 prompts x 2 samples = 8 trajectories -> 1 update"
    assert lines[4] == "          of 8 on 1 trainer, up to 16384 tokens per"


def test_a_notebook_shows_one_display_with_a_bar_a_curve_and_the_lines(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as notebooks do
    pages: list[str] = []
    console = Console(clock=clock, show=pages.append)
    console.banner("addition", Path("runs/addition"), "tiny", ["<plan>"])
    console.begin(100)
    for step in range(1, 101):
        clock.now_s += 0.05
        console.log(step, {"reward/mean": step / 100})
    console.close()
    assert len(pages) < 30  # four in a second, however many lines there are
    assert '<progress value="100" max="100"' in pages[-1]
    assert "reward/mean 1.000, from 0.010 to 1.000" in pages[-1]
    assert pages[-1].count(",") > 100  # points of the curve
    assert "plan    &lt;plan&gt;" in pages[-1]
    assert "step 100/100" in pages[-1]


def test_who_prints_needs_no_signs_of_life(console: Console, stream: io.StringIO, clock: Clock) -> None:
    passing = Passing(clock, lambda: clock.now_s % 20 or console.note(f"{clock.now_s:g} s"))
    with console.signs_of_life(passing):
        assert passing.is_over.wait(within(30))
    assert stream.getvalue().splitlines() == ["20 s", "40 s", "60 s", "80 s", "100 s", "120 s"]
