import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import within
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.observe.run_files import MetricsFile, json_line, read_metrics
from corral.recipe.errors import UserError


def test_what_is_logged_is_read_back(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.log(1, {"reward/mean": 0.5, "kl/mean": 0.25})
    metrics.log(2, {"reward/mean": 0.75})
    assert read_metrics(metrics.path) == [
        {"step": 1, "kl/mean": 0.25, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.75},
    ]


def test_a_line_has_the_step_first_and_the_metrics_sorted(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.log(1, {"b": 2.0, "a": 1.0})
    assert metrics.path.read_text() == '{"step": 1, "a": 1.0, "b": 2.0}\n'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_a_number_that_is_not_finite_is_written_as_null(tmp_path: Path, value: float) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.log(1, {"loss": value, "reward/mean": 1.0})
    assert read_metrics(metrics.path) == [{"step": 1, "loss": None, "reward/mean": 1.0}]


def test_numpy_numbers_are_written_as_plain_ones(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    numbers: dict[str, Any] = {"float": np.float32(0.5), "int": np.int64(3)}
    metrics.log(1, numbers)
    assert read_metrics(metrics.path) == [{"step": 1, "float": 0.5, "int": 3}]


def test_truncate_after_drops_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(5):
        metrics.log(step, {"x": step})
    metrics.truncate_after(2)
    metrics.log(3, {"x": 30})
    assert [(row["step"], row["x"]) for row in read_metrics(metrics.path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_truncate_after_leaves_a_run_without_metrics_alone(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "metrics.jsonl").truncate_after(2)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_line_torn_by_a_kill_is_not_read_and_a_resumed_run_writes_over_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rewa')
    assert read_metrics(path) == [{"step": 1}]
    MetricsFile(path).log(2, {"x": 1})
    assert read_metrics(path) == [{"step": 1}, {"step": 2, "x": 1}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2"):
        read_metrics(path)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
from pathlib import Path
from typing import Any
from corral.observe.run_files import MetricsFile
metrics = MetricsFile(Path(sys.argv[1]))
metrics.log(1, {"x": 1.0})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))
try:
    metrics.log(2, {"x": 1.0})
except OSError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert error.filename == sys.argv[1]
    metrics.log(3, {"x": 1.0})
"""
    path = tmp_path / "metrics.jsonl"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=within(30))
    assert [row["step"] for row in read_metrics(path)] == [1, 3]


def test_every_line_is_on_disk_when_the_process_is_killed(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from typing import Any
from corral.observe.run_files import MetricsFile
metrics = MetricsFile(Path(sys.argv[1]))
for step in range(3):
    metrics.log(step, {"x": 1.0})
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "metrics.jsonl"
    subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=within(30))
    assert len(read_metrics(path)) == 3


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(), values))
@pytest.mark.slow
def test_any_plain_record_is_one_line_that_reads_back(record: dict[str, object]) -> None:
    line = json_line(record)
    assert line.count(b"\n") == 1
    assert json.loads(line) == record


def test_a_lone_surrogate_survives() -> None:
    assert json.loads(json_line({"text": "a\udc80b"})) == {"text": "a\udc80b"}
