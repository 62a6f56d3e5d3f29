from pathlib import Path
from typing import Any

import pytest

from corral.observe.trajectory_store import TrajectoryStore, TrajectoryWriter
from corral.recipe.errors import UserError


def record(**values: Any) -> dict[str, Any]:
    return {
        "prompt_id": 7,
        "sample": 0,
        "row": 3,
        "tag": "",
        "reward": 1.0,
        "rewards": {"format": None, "answer": 1.0},
        "turn_rewards": [1.0],
        "stop": "end_of_turn",
        "error": None,
        "prompt": "1 + 1 =",
        "response": "2",
        "metrics": {"steps": 2.0},
        "prompt_tokens": [1, 2, 3],
        "response_tokens": [4, 5, 6],
        "generated": [1, 0, 1],
        "logprobs": [-0.5, 0.0, -0.25],
        "versions": [4, -1, 5],
        "advantages": [0.5, 0.0, 0.5],
        **values,
    }


def test_a_folder_that_is_not_there_has_no_parts(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "trajectories")
    assert store.parts() == []
    with pytest.raises(UserError, match="step 1"):
        store.summaries(1)


def test_parts_are_sorted_and_other_files_are_not_among_them(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path)
    for step, part in ((10, None), (2, "validation"), (2, None)):
        writer.write(step, [record()], part=part)
    for name in (".step_000003.jsonl.gz.tmp", "step_x.jsonl.gz", "notes.txt"):
        (tmp_path / name).write_text("")
    assert TrajectoryStore(tmp_path).parts() == [(2, ""), (2, "validation"), (10, "")]


def test_a_summary_has_ids_rewards_lengths_and_the_beginning_of_the_text(tmp_path: Path) -> None:
    TrajectoryWriter(tmp_path).write(1, [record(), record(sample=1, reward=None, error="timeout", response="x" * 999)])
    first, second = TrajectoryStore(tmp_path).summaries(1)
    assert {name: first[name] for name in ("index", "prompt_id", "sample", "row", "reward", "stop", "preview")} == {
        "index": 0,
        "prompt_id": 7,
        "sample": 0,
        "row": 3,
        "reward": 1.0,
        "stop": "end_of_turn",
        "preview": "2",
    }
    lengths = [first[name] for name in ("num_prompt_tokens", "num_response_tokens", "num_generated", "num_turns")]
    assert (lengths, first["rewards"]) == ([3, 3, 2, 1], {"format": None, "answer": 1.0})
    assert (second["index"], second["reward"], second["error"], second["preview"]) == (1, None, "timeout", "x" * 160)
    assert "response" not in first


def test_one_trajectory_is_read_with_all_that_was_written(tmp_path: Path) -> None:
    TrajectoryWriter(tmp_path).write(1, [record(sample=i) for i in range(3)], part="validation")
    store = TrajectoryStore(tmp_path)
    found = store.trajectory(1, 2, "validation")
    assert found | record(sample=2) == found
    for missing in (-1, 3):
        with pytest.raises(UserError, match=f"no trajectory {missing}"):
            store.trajectory(1, missing, "validation")
