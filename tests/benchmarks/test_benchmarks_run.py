"""The benchmarks of the loop still run; what they measure is not looked at."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import within
from forked_pythons import RAY_PYTHON

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, results: Path, *options: str) -> dict[str, object]:
    """What the benchmark found."""
    subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--smoke", "--results", str(results), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(BENCHMARKS.parent), RAY_PYTHON])},
        cwd=results,
        check=True,
        timeout=within(180),
    )
    workloads: dict[str, object] = json.loads((results / script).with_suffix(".json").read_text())["workloads"]
    return workloads


@pytest.mark.slow
def test_the_driver_overhead_is_measured_without_ray(tmp_path: Path) -> None:
    assert run("driver_overhead.py", tmp_path, "--no-ray").keys() == {"total", "stages", "functions"}


@pytest.mark.slow
def test_concurrent_trajectories_are_measured(tmp_path: Path) -> None:
    assert "concurrent_trajectories" in run("concurrent_trajectories.py", tmp_path)


@pytest.mark.slow
def test_the_retriever_is_measured_under_load(tmp_path: Path) -> None:
    assert "bm25" in run("retriever_load.py", tmp_path)


@pytest.mark.slow
def test_the_page_is_measured_on_a_large_run(tmp_path: Path) -> None:
    assert "view" in run("view_run.py", tmp_path)


@pytest.mark.xdist_group("ray")
@pytest.mark.slow
def test_overlap_is_measured_on_ray(tmp_path: Path) -> None:
    found = run("overlap.py", tmp_path, "--schedules", "staleness 1, pipelined")
    assert "overlap" in found


@pytest.mark.slow
def test_supervised_fine_tuning_is_measured_beside_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    assert "shared_beginning" in run("sft.py", tmp_path)


@pytest.mark.xdist_group("ray")
@pytest.mark.slow
def test_scaling_is_measured(tmp_path: Path) -> None:
    found = run("scaling.py", tmp_path, "--layouts", "no Ray, 1 process", "Ray, 1 worker")
    assert "scaling" in found


def test_the_soak_says_which_process_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import soak  # type: ignore[import-not-found]

    samples = [{"steady 1": [50.0, 3], "grows 2": [100.0 + at, 4 + at // 6]} for at in range(8)]
    samples[0].pop("grows 2")  # it starts late
    for at in (3, 4):
        samples[at]["short 3"] = [500.0, 9]
    rows = soak.rows_of_processes(samples, hours=1.0)
    assert rows == [
        ["grows 2", "102.5", "106.5", "8.0", "4.0", "5.0"],
        ["steady 1", "50.0", "50.0", "0.0", "3.0", "3.0"],
    ]
