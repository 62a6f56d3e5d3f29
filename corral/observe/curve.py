"""The learning curve of a run as a picture, drawn from the rows of `metrics.jsonl`."""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from corral.observe.console import held_out_score, is_fraction, score_text
from corral.observe.run_files import replacing

TRAIN, VALIDATION, QUIET, GRID = "#2563eb", "#ea580c", "#57606a", "#e5e7eb"
SMALL_PANELS = {
    "policy/nll": "loss",
    "preference/loss": "loss",
    "validation/loss": "validation loss",
    "preference/accuracy": "accuracy",
    "preference/margin": "margin",
    "policy/entropy": "entropy",
    "kl/mean": "KL",
    "length/mean": "response length",
}
LOSSES = {"policy/nll": "loss per trained token", "preference/loss": "loss per pair"}
FEW_POINTS = 40
BASELINES = ("random", "optimal")
"""Scores that are drawn as horizontal lines."""
ENVIRONMENT = "validation/environment/"


def draw_curve(rows: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Training reward and validation score above, or without any the losses where rows are trained on; entropy, KL and
    response length below, those that were measured."""
    from matplotlib.figure import Figure

    small = {name: label for name, label in SMALL_PANELS.items() if points(rows, name)[0]}
    small |= {name: f"success, {tag}" for tag, name in successes(rows).items()}
    draw = _draw_scores
    if any(points(rows, loss)[0] for loss in LOSSES) and all(held_out_score(row) is None for row in rows):
        draw = _draw_losses
        small = {name: label for name, label in small.items() if label not in ("loss", "validation loss")}
    figure = Figure(figsize=(9, 6.2 if small else 4.5), dpi=150, layout="constrained")
    grid = figure.add_gridspec(2 if small else 1, max(len(small), 1), height_ratios=[2.6, 1] if small else None)
    large = figure.add_subplot(grid[0, :])
    draw(large, rows, title)
    for column, (name, label) in enumerate(small.items()):
        axes = figure.add_subplot(grid[1, column], sharex=large)
        _draw_line(axes, *points(rows, name), QUIET, width=1.6)
        axes.set_title(label, loc="left", fontsize=10)
        if name.startswith(ENVIRONMENT):
            tag = name.removeprefix(ENVIRONMENT).removesuffix("success")
            _draw_baselines(axes, rows, f"{tag}success")
        _style(axes)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    with replacing(path) as file:
        file.write(picture.getvalue())


def points(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric. A step that was logged again counts once; null (no finite number) is left out."""
    by_step = {row["step"]: row[name] for row in rows if row.get(name) is not None}
    return sorted(by_step), [by_step[step] for step in sorted(by_step)]


def describe_training(rows: Sequence[Mapping[str, Any]]) -> str:
    """`reward 0.105 -> 0.797 (means of the first and last 4 of 40 steps)`, or of the loss where rows are trained on;
    empty where fewer than two steps were made."""
    for name, label in {"reward/mean": "reward", **dict.fromkeys(LOSSES, "loss")}.items():
        _, values = points(rows, name)
        if len(values) > 1:
            number = max(1, len(values) // 10)
            first, last = fmean(values[:number]), fmean(values[-number:])
            which = f"means of the first and last {number}" if number > 1 else "first and last"
            return f"{label} {first:.3f} -> {last:.3f} ({which} of {len(values)} steps)"
    return ""


def smooth(values: Sequence[float]) -> list[float]:
    """The mean over a window around each value, which does not lag behind as a running mean would."""
    reach = max(len(values) // 16, 2)
    windows = [values[max(index - reach, 0) : index + reach + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _draw_scores(axes: Any, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    from matplotlib.ticker import PercentFormatter

    steps, rewards = points(rows, "reward/mean")
    if steps:
        _draw_line(axes, steps, rewards, TRAIN, width=2.2, label="training reward")
    validations = {row["step"]: row for row in rows if held_out_score(row) is not None}
    if validations:
        _draw_validations(axes, [validations[step] for step in sorted(validations)])
    _draw_baselines(axes, rows, "reward")
    if all(0 <= value <= 1 for value in rewards) and all(map(is_fraction, validations.values())):
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(bottom, -0.02), min(top, 1.02))
    axes.set_title(title.replace("$", r"\$"), loc="left", fontsize=13, fontweight="bold", pad=10)
    axes.set_ylabel("reward")
    _style(axes)
    if steps or validations:
        axes.legend(frameon=False, loc="best")


def _draw_losses(axes: Any, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    loss = next(loss for loss in LOSSES if points(rows, loss)[0])
    _draw_line(axes, *points(rows, loss), TRAIN, width=2.2, label="training loss")
    steps, held_out = points(rows, "validation/loss")
    if steps:
        axes.plot(steps, held_out, color=VALIDATION, linewidth=1.4, marker="o", label="validation loss", zorder=3)
    axes.set_title(title.replace("$", r"\$"), loc="left", fontsize=13, fontweight="bold", pad=10)
    axes.set_ylabel(LOSSES[loss])
    _style(axes)
    axes.legend(frameon=False, loc="best")


def successes(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The metric of each environment's success, by tag, where there are several environments."""
    names = {name for row in rows for name in row if name.startswith(ENVIRONMENT) and name.endswith("/success")}
    tags = {name: name.removeprefix(ENVIRONMENT).removesuffix("/success") for name in sorted(names)}
    return {tag: name for name, tag in tags.items() if name != f"{ENVIRONMENT}success"}


def _draw_baselines(axes: Any, rows: Sequence[Mapping[str, Any]], metric: str) -> None:
    for label in BASELINES:
        _, level = points(rows, f"validation/{label}/{metric}")
        if level:
            axes.axhline(level[-1], color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
            place = {"xy": (1, level[-1]), "xycoords": ("axes fraction", "data"), "va": "bottom", "ha": "right"}
            axes.annotate(f"{label} {level[-1]:.2f}", **place, color=QUIET, fontsize=9, zorder=4)


def _draw_validations(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    intervals = [row.get("validation/ci95") or 0.0 for row in rows]
    axes.errorbar(
        [row["step"] for row in rows],
        [held_out_score(row) for row in rows],
        yerr=intervals,
        color=VALIDATION,
        linewidth=1.4,
        marker="o",
        markersize=6,
        capsize=4,
        label="validation score, 95 % interval" if any(intervals) else "validation score",
        zorder=3,
    )
    if len(rows) > 1:
        change = " → ".join(score_text({**row, "validation/ci95": None}) for row in (rows[0], rows[-1]))
        axes.set_title(f"validation {change}", loc="right", color=VALIDATION, fontsize=11, fontweight="bold", pad=10)


def _draw_line(
    axes: Any, steps: Sequence[int], values: Sequence[float], color: str, width: float, label: str | None = None
) -> None:
    """Draws the values as a light line, and the smoothed ones over it."""
    marker = "." if len(steps) < FEW_POINTS else ""
    axes.plot(steps, values, color=color, alpha=0.3, linewidth=width / 2, marker=marker, label=label)
    axes.plot(steps, smooth(values), color=color, linewidth=width, label=label and f"{label}, smoothed")


def _style(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
