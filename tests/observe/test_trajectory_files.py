from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.observe.trajectory_store import TrajectoryWriter, read_trajectories


def test_records_are_read_back(tmp_path: Path) -> None:
    records = [{"prompt": "1 + 1 =\n", "tokens": [1, 2], "reward": 1.0}, {"prompt": "你好", "reward": float("nan")}]
    path = TrajectoryWriter(tmp_path).write(12, records)
    assert path.name == "step_000012.jsonl.gz"
    assert list(read_trajectories(path)) == [records[0], {"prompt": "你好", "reward": None}]


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path)
    writer.write(1, [{"reward": 0.0}] * 3)
    path = writer.write(1, [{"reward": 1.0}])
    assert list(read_trajectories(path)) == [{"reward": 1.0}]
    assert list(tmp_path.iterdir()) == [path]


def test_equal_trajectories_are_equal_files(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path)
    assert writer.write(1, [{"a": 1}]).read_bytes() == writer.write(2, [{"a": 1}]).read_bytes()


def test_a_step_that_fails_half_way_leaves_the_earlier_file_as_it_was(tmp_path: Path) -> None:
    def fails() -> Iterator[dict[str, float]]:
        yield {"reward": 1.0}
        raise RuntimeError("no more")

    writer = TrajectoryWriter(tmp_path)
    path = writer.write(1, [{"reward": 0.0}])
    with pytest.raises(RuntimeError):
        writer.write(1, fails())
    assert list(read_trajectories(path)) == [{"reward": 0.0}]
    assert list(tmp_path.iterdir()) == [path]


def test_parts_of_one_step_are_files_of_their_own(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path)
    writer.write(3, [{"a": 1}])
    assert writer.write(3, [{"a": 2}], part="validation").name == "step_000003.validation.jsonl.gz"
    assert len(list(tmp_path.iterdir())) == 2


def test_truncate_after_deletes_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path)
    for step in range(1, 5):
        writer.write(step, [{"step": step}])
    writer.write(4, [], part="validation")
    writer.truncate_after(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001.jsonl.gz", "step_000002.jsonl.gz"]
