import struct
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import within

from corral.observe.curve import draw_curve, points, smooth

VALIDATION = {"validation/mean@1": 0.3, "validation/ci95": 0.05}


def size_of(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, **VALIDATION}],
        [{"step": 1, "reward/mean": 0.5}],
        [{"step": 0, **VALIDATION}, {"step": 1, "reward/mean": None, "kl/mean": None}],
        [
            {"step": step, "reward/mean": -step, "policy/entropy": 1.0, "kl/mean": 0.0, **VALIDATION}
            for step in range(50)
        ],
        [{"step": 0, "validation/loss": 4.0}, {"step": 1, "policy/nll": 3.9, "policy/entropy": 1.0}],
        [{"step": 0, "validation/loss": 4.0, **VALIDATION}, {"step": 1, "policy/nll": 3.9}],
    ],
    ids=["nothing", "only validation", "one step", "nothing finite", "rewards below zero", "losses", "loss and score"],
)
def test_any_run_has_a_picture(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    draw_curve(rows, tmp_path / "curve.png", "costs $5, not $6")
    assert min(size_of(tmp_path / "curve.png")) > 500


def test_panels_are_drawn_for_what_was_measured(tmp_path: Path) -> None:
    draw_curve([{"step": 1, "reward/mean": 0.5}], tmp_path / "without.png", "run")
    draw_curve([{"step": 1, "reward/mean": 0.5, "kl/mean": 0.1}], tmp_path / "with.png", "run")
    assert size_of(tmp_path / "with.png")[1] > size_of(tmp_path / "without.png")[1]


def test_baselines_are_lines_in_the_picture(tmp_path: Path) -> None:
    rows = [{"step": step, "reward/mean": 0.5, **VALIDATION} for step in range(3)]
    draw_curve(rows, tmp_path / "without.png", "run")
    draw_curve([{**row, "validation/random/reward": 0.4} for row in rows], tmp_path / "with.png", "run")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


@pytest.mark.slow
def test_drawing_leaves_the_users_pyplot_alone(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from corral.observe.curve import draw_curve
draw_curve([{{"step": 1, "reward/mean": 0.5}}], Path({str(tmp_path / "curve.png")!r}), "run")
assert "matplotlib.pyplot" not in sys.modules
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=within(60))


def test_a_step_that_was_logged_again_counts_once() -> None:
    rows: list[dict[str, float | None]] = [
        {"step": 2, "x": 1.0},
        {"step": 1, "x": 0.5},
        {"step": 2, "x": 2.0},
        {"step": 3, "x": None},
    ]
    assert points(rows, "x") == ([1, 2], [0.5, 2.0])


def test_smoothing_keeps_a_constant_and_the_number_of_points() -> None:
    assert smooth([0.5] * 100) == pytest.approx([0.5] * 100)
    assert smooth([1.0]) == [1.0]
    assert smooth([]) == []
