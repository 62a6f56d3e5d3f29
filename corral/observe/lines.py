"""Numbers and texts as a person reads them: pure functions behind the console."""

import math
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.text import Text


def duration(seconds: float) -> str:
    """45s, 3m20s, 2h05m, 3d04h."""
    if not math.isfinite(seconds):
        return "?"
    total = round(max(seconds, 0.0))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    minutes = total // 60
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = minutes // 60
    return f"{hours // 24}d{hours % 24:02d}h"


def short_duration(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 59.95 else duration(seconds)


def small_number(value: float) -> str:
    """0.0012, and 3.4e-05 where that would read as zero."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"


@dataclass(frozen=True)
class Field:
    """A metric in the line of a step. `importance`: the lowest are left out first where the terminal is narrow."""

    key: str
    label: str
    width: int
    write: Callable[[float], str]
    importance: int
    unit: str = ""

    def text(self, value: float | None) -> Text:
        """As wide for any value, and for none, so that lines align."""
        if value is None:
            return Text(" " * self.cells)
        label = f"{self.label} " if self.label else ""
        return Text.assemble((label, "dim"), self.write(value).rjust(self.width), (self.unit, "dim"))

    @property
    def cells(self) -> int:
        return len(self.label) + bool(self.label) + self.width + len(self.unit)


STEP_FIELDS = (
    Field("reward/mean", "reward", 6, "{:.3f}".format, 9),
    Field("kl/mean", "kl", 8, small_number, 5),
    Field("policy/entropy", "entropy", 5, "{:.2f}".format, 4),
    Field("length/mean", "length", 7, "{:.1f}".format, 3),
    Field("speed/tokens_per_s", "", 6, "{:.0f}".format, 2, " tok/s"),
    Field("time/rollout_s", "play", 6, short_duration, 0),
    Field("time/train_s", "learn", 6, short_duration, 1),
    Field("time/step_s", "step", 6, short_duration, 7),
    Field("eta_s", "eta", 6, duration, 8),
)
TROUBLE_FIELDS = (
    Field("updates/skipped", "skipped updates", 0, "{:.0f}".format, 9),
    Field("samples/dropped_groups", "dropped groups", 0, "{:.0f}".format, 9),
)


def step_line(step: int, total: int | None, metrics: Mapping[str, float], columns: set[str], width: int | None) -> Text:
    """The line of a step. `columns` are the metrics that earlier lines showed: their places are kept free."""
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
    """held-out before training: 31.0 % ± 4.1 (200 questions)"""
    parts = [f"held-out {when}: {score_text(metrics)}"]
    pass_at = [name for name in sorted(metrics) if name.startswith("validation/pass@") and name != "validation/pass@1"]
    parts += [f"{name.removeprefix('validation/')} {percent(metrics[name])}" for name in pass_at]
    if num_questions is not None:
        parts[-1] += f" ({num_questions} {noun}{'s' if num_questions != 1 else ''})"
    return ", ".join(parts)


@dataclass(frozen=True)
class EnvironmentScore:
    """How an environment was played."""

    tag: str
    measured: Mapping[str, float]
    """`success`, `valid_actions`, ... on average."""
    floor: Mapping[str, float]
    """Of random play: reward, success."""
    ceiling: Mapping[str, float]


def environment_scores(metrics: Mapping[str, float]) -> list[EnvironmentScore]:
    """One for each tag, or for the only environment; none where environments measure nothing."""
    measured, floor, ceiling = (
        {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        for prefix in ("validation/environment/", "validation/random/", "validation/optimal/")
    )
    ends = ("/reward", "/turns", "/length")  # which every tag has, see `loop/step_records.py`
    named = {name.removesuffix(ends[0]) for name in measured if name.endswith(ends[0])}
    tags = sorted(tag for tag in named if all(f"{tag}{end}" in measured for end in ends))

    def below(numbers: Mapping[str, float], tag: str) -> dict[str, float]:
        prefix = f"{tag}/" if tag else ""
        own = {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}
        return {name: value for name, value in own.items() if "/" not in name}

    found = [
        EnvironmentScore(tag, below(measured, tag), below(floor, tag), below(ceiling, tag)) for tag in tags or [""]
    ]
    return [score for score in found if score.measured]


def score_text(metrics: Mapping[str, float | None]) -> str:
    """31.0 % ± 4.1; scores outside of [0, 1] are not shares, and stay numbers."""
    score = held_out_score(metrics)
    if score is None:
        return "no score"
    interval = metrics.get("validation/ci95")
    scale, unit, digits = (100, " %", 1) if 0 <= score <= 1 else (1, "", 3)
    text = f"{scale * score:.{digits}f}{unit}"
    return text if interval is None else f"{text} ± {scale * interval:.{digits}f}"


def held_out_score(metrics: Mapping[str, float | None]) -> float | None:
    """`validation/mean@k`, whichever k."""
    return next((metrics[name] for name in sorted(metrics) if name.startswith("validation/mean@")), None)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def visible(text: str) -> str:
    """On one line: line breaks are shown as ⏎, and what could move the cursor or colour the terminal as its code."""
    text = text.replace("\r\n", "\n").replace("\n", "⏎").replace("\t", " ")
    return "".join(sign.encode("unicode_escape").decode() if _is_control(sign) else sign for sign in text)


def _is_control(sign: str) -> bool:
    # The two joiners are part of how Persian, Hindi and emoji are written.
    return unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp") and sign not in "\u200c\u200d"


def cut(text: str, width: int, keep: Literal["start", "end", "both"]) -> str:
    """At most `width` cells wide; `…` stands for what was cut."""
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
