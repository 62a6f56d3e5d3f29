"""One line that says what is being waited for: rewritten in place on a terminal, now and then a new one elsewhere."""

import sys
import time
from typing import TextIO

from corral.recipe.errors import without_controls

EVERY_S = 5.0


class StatusLine:
    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.is_terminal = self.stream.isatty()
        self.text, self.next = "", 0.0

    def show(self, text: str, countdown: str = "") -> None:
        """`countdown` changes all the time; alone it is no reason for a new line."""
        text = without_controls(text)
        if self.is_terminal:
            self.stream.write(f"\r\033[K{text}{countdown}")
        elif text != self.text or time.monotonic() >= self.next:
            self.stream.write(f"{text}{countdown}\n")
            self.next = time.monotonic() + EVERY_S
        self.text = text
        self.stream.flush()

    def clear(self) -> None:
        if self.is_terminal and self.text:
            self.stream.write("\r\033[K")
            self.stream.flush()
        self.text = ""


class Countdown:
    """A wait that says what is missing and how much longer it goes on."""

    def __init__(self, timeout_s: float, line: StatusLine, poll_s: float = 0.5) -> None:
        self.timeout_s, self.line, self.poll_s = timeout_s, line, poll_s
        self.deadline = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0

    def more(self, missing: str) -> None:
        self.line.show(f"waiting for {missing}", f" ({self.left_s:.0f} s left)")
        time.sleep(min(self.poll_s, self.left_s))
