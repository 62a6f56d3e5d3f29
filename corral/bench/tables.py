"""What was measured, as rows of text."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
NAMES = {"corral": "Corral", "vllm": "vLLM", "trl": "TRL", "transformers": "transformers"}
TITLES = {
    "rollout": "Rollout: new tokens a second",
    "train": "Training: forward, backward and AdamW",
    "step": "A GRPO step",
}
COLUMNS = {
    "rollout": "workload | side | new tokens/s | against Corral | of the bandwidth | seconds | mean log-prob"
    " | start-up s | peak GB | device GB",
    "train": "side | recompute | masters | ms a step | tokens/s | of the matrix peak | against Corral | peak GB",
    "step": "side | s a step: median (min-max) | generation s | rest s | new tokens/s | time against Corral"
    " | start-up s | peak GB | device GB",
}


def table(verb: str, rows: Sequence[Row], facts: Row) -> list[list[str]]:
    """Its first line is the columns' names."""
    cells = {"rollout": rollout_cells, "train": train_cells, "step": step_cells}[verb]
    ordered = sorted(rows, key=lambda row: row["workload"]) if verb == "rollout" else rows
    return [COLUMNS[verb].split(" | "), *(cells(row, corral_of(row, rows), facts) for row in ordered)]


def corral_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Corral's row for the same work."""
    same = ("workload", "recompute")
    for one in rows:
        if one["side"] == "corral" and all(one.get(key) == row.get(key) for key in same):
            return one
    return None


def rollout_cells(row: Row, corral: Row | None, facts: Row) -> list[str]:
    bandwidth = row["decode_bytes"] * row["tokens_per_s"] / row["tokens"] / 1e12
    return [
        f"{row['workload']} ({row['num_requests']} requests)",
        named(row),
        f"{row['tokens_per_s']:,.0f}",
        ratio("tokens_per_s", row, corral),
        share(bandwidth, facts.get("copy_tbs")),
        ", ".join(f"{seconds:.2f}" for seconds in row["seconds"]),
        "" if row["mean_logprob"] is None else f"{row['mean_logprob']:.3f}",
        f"{row['start_up_s']:.0f}",
        number(row.get("peak_gb")) if row["side"] != "vllm" else "",
        number(row.get("device_gb")),
    ]


def train_cells(row: Row, corral: Row | None, facts: Row) -> list[str]:
    return [
        named(row),
        row["recompute"],
        row["masters"],
        f"{1000 * row['step_s']:.1f}",
        f"{row['tokens_per_s']:,.0f}",
        share(row["tflops"], facts.get("matrix_tflops")),
        ratio("tokens_per_s", row, corral),
        number(row.get("peak_gb")),
    ]


def step_cells(row: Row, corral: Row | None, facts: Row) -> list[str]:
    return [
        named(row),
        f"{row['step_s']:.2f} ({min(row['seconds']):.2f}-{max(row['seconds']):.2f})",
        f"{row['generation_s']:.2f}",
        f"{row['rest_s']:.2f}",
        f"{row['tokens_per_s']:,.0f}",
        ratio("step_s", row, corral),
        f"{row['start_up_s']:.0f}",
        number(row.get("peak_gb")),
        number(row.get("device_gb")),
    ]


def named(row: Row) -> str:
    variant = row.get("variant")
    return NAMES[row["side"]] + (f" ({variant})" if variant else "")


def share(value: float, ceiling: float | None) -> str:
    return "" if not ceiling else f"{value / ceiling:.1%}"


def ratio(key: str, row: Row, corral: Row | None) -> str:
    return "" if corral is None else f"{row[key] / corral[key]:.2f} x"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def in_markdown(lines: Sequence[Sequence[str]]) -> str:
    """With columns as wide as their widest cell, so that it reads as well on a terminal."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = ["-" * max(3, width) for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in [lines[0], rule, *lines[1:]]
    )
