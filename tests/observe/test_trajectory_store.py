import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corral.observe.trajectory_store import (
    DETAILS,
    TrajectoryStore,
    TrajectoryWriter,
    read_trajectories,
    repeated_fraction,
)
from corral.recipe.errors import UserError

HOSTILE = "<script>alert(1)</script>\x1b[2J\0\r\n\u202egnp.exe\u2028 \N{PILE OF POO}" + "x" * 100_000


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


def write_as_before(folder: Path, step: int, records: list[dict[str, Any]]) -> Path:
    """As earlier releases did."""
    path = folder / f"step_{step:06d}.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(json.dumps(one).encode() + b"\n" for one in records)))
    return path


def long_records(number: int, num_tokens: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        record(
            sample=i,
            response=f"{i} " * num_tokens,
            response_tokens=rng.integers(0, 50_000, num_tokens),
            generated=np.ones(num_tokens, np.bool_),
            logprobs=rng.normal(size=num_tokens).astype(np.float32),
            versions=np.full(num_tokens, 3),
            advantages=None,
        )
        for i in range(number)
    ]


# --- writing


def test_records_are_read_back(tmp_path: Path) -> None:
    records = [record(), record(prompt="你好\n", reward=float("nan"), metrics={"other": math.inf})]
    path = TrajectoryWriter(tmp_path).write(12, records)
    assert path.name == "step_000012.parquet"
    first, second = read_trajectories(path)
    assert first | records[0] == first
    assert (second["prompt"], second["reward"], second["metrics"]) == ("你好\n", None, {})


def test_pandas_reads_a_file_as_it_is(tmp_path: Path) -> None:
    written = long_records(300, 400)
    path = TrajectoryWriter(tmp_path).write(1, written)
    frame = pandas.read_parquet(path)
    assert frame["sample"].tolist() == list(range(300))
    assert frame["rewards/answer"].tolist() == [1.0] * 300
    assert frame["rewards/format"].isna().all()
    for row, one in zip(frame.itertuples(), written, strict=True):
        assert row.response == one["response"]
        for name in ("response_tokens", "logprobs", "versions", "generated"):
            assert np.array_equal(getattr(row, name), one[name]), name
        assert row.advantages is None


def test_columns_have_plain_types_and_those_of_a_list_come_first(tmp_path: Path) -> None:
    file = pq.ParquetFile(TrajectoryWriter(tmp_path).write(1, [record()]))
    for field in file.schema_arrow:
        kind = field.type.value_type if pa.types.is_list(field.type) else field.type
        assert pa.types.is_integer(kind) or pa.types.is_floating(kind) or kind in (pa.string(), pa.bool_(), pa.binary())
    names = file.schema_arrow.names
    first_long = min(map(names.index, DETAILS))
    assert names[first_long:] == list(DETAILS)
    assert {"reward", "stop", "rewards/format", "metrics/steps", "preview"} <= set(names[:first_long])


def test_a_row_group_is_small_and_a_long_trajectory_has_one_of_its_own(tmp_path: Path) -> None:
    lengths = [10_000] * 20 + [200_000] + [10] * 30
    records = [record(response_tokens=np.zeros(length, np.int64)) for length in lengths]
    path = TrajectoryWriter(tmp_path).write(1, records)
    metadata = pq.ParquetFile(path).metadata
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sum(groups) == len(lengths)
    assert max(groups[:3]) <= 7
    assert [one["num_response_tokens"] for one in TrajectoryStore(tmp_path).summaries(1)] == lengths
    assert len(TrajectoryStore(tmp_path).trajectory(1, 20)["response_tokens"]) == 200_000


def test_files_have_numbers_that_are_not_finite_and_records_have_none(tmp_path: Path) -> None:
    numbers = [math.nan, -math.inf, 0.5]
    path = TrajectoryWriter(tmp_path).write(1, [record(logprobs=numbers)])
    [column] = pq.read_table(path)["logprobs"].to_pylist()
    assert math.isnan(column[0])
    assert column[1:] == numbers[1:]
    assert TrajectoryStore(tmp_path).trajectory(1, 0)["logprobs"] == [None, None, 0.5]


def test_hostile_text_stays_the_text_that_it_is(tmp_path: Path) -> None:
    given = {"prompt": HOSTILE, "response": HOSTILE, "error": HOSTILE, "tool_errors": [HOSTILE]}
    TrajectoryWriter(tmp_path).write(1, [record(**given, metrics={"a/b.c/": 1.0, "": 2.0, "é\0": 3.0})])
    found = TrajectoryStore(tmp_path).trajectory(1, 0)
    assert {name: found[name] for name in given} == given
    [summary] = TrajectoryStore(tmp_path).summaries(1)
    assert found["metrics"] == summary["metrics"] == {"a/b.c/": 1.0, "": 2.0, "é\0": 3.0}
    assert (summary["preview"], summary["error"]) == (HOSTILE[:160], HOSTILE)


def test_a_lone_surrogate_has_its_backslash_form(tmp_path: Path) -> None:
    given = {"response": "a\ud800b", "tool_errors": ["\udfff"], "metrics": {"\ud800": 1.0}, "tag": "你"}
    TrajectoryWriter(tmp_path).write(1, [record(**given), record()])
    found = TrajectoryStore(tmp_path).trajectory(1, 0)
    assert (found["response"], found["tool_errors"], found["metrics"]) == (r"a\ud800b", [r"\udfff"], {r"\ud800": 1.0})
    assert found["tag"] == "你"


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path)
    write_as_before(tmp_path, 1, [record()] * 4)
    writer.write(1, [record(reward=0.0)] * 3)
    path = writer.write(1, [record(reward=0.5)])
    assert [one["reward"] for one in read_trajectories(path)] == [0.5]
    assert list(tmp_path.iterdir()) == [path]


def test_equal_trajectories_are_equal_files(tmp_path: Path) -> None:
    writer, records = TrajectoryWriter(tmp_path), long_records(100, 1000)
    assert writer.write(1, records).read_bytes() == writer.write(2, records).read_bytes()


def test_a_step_that_fails_half_way_leaves_the_earlier_file_as_it_was(tmp_path: Path) -> None:
    def fails() -> Iterator[dict[str, Any]]:
        yield record()
        raise RuntimeError("no more")

    writer = TrajectoryWriter(tmp_path)
    path = writer.write(1, [record(reward=0.0)])
    for broken in (fails(), [record(versions=["no number"])]):
        with pytest.raises((RuntimeError, ValueError)):
            writer.write(1, broken)
    assert [one["reward"] for one in read_trajectories(path)] == [0.0]
    assert list(tmp_path.iterdir()) == [path]


def test_truncate_after_deletes_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path)
    write_as_before(tmp_path, 1, [record()])
    write_as_before(tmp_path, 3, [record()])
    for step in range(2, 5):
        writer.write(step, [record()])
    writer.write(4, [], part="validation")
    writer.truncate_after(2)
    assert TrajectoryStore(tmp_path).parts() == [(1, ""), (2, "")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001.jsonl.gz", "step_000002.parquet"]


def test_delete_before_keeps_the_last_steps(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path)
    for step in range(4):
        writer.write(step, [record()])
    writer.write(2, [], part="validation")
    writer.delete_before(2)
    assert TrajectoryStore(tmp_path).parts() == [(2, ""), (2, "validation"), (3, "")]


# --- reading


def test_a_folder_that_is_not_there_has_no_parts(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "trajectories")
    assert store.parts() == []
    with pytest.raises(UserError, match="step 1"):
        store.summaries(1)


def test_parts_are_sorted_and_other_files_are_not_among_them(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path)
    for step, part in ((10, ""), (2, "validation"), (2, "")):
        writer.write(step, [record()], part=part)
    write_as_before(tmp_path, 4, [record()])
    for name in (".step_000003.parquet.tmp", "step_x.parquet", "notes.txt"):
        (tmp_path / name).write_text("")
    assert TrajectoryStore(tmp_path).parts() == [(2, ""), (2, "validation"), (4, ""), (10, "")]


@pytest.mark.parametrize("is_old", [False, True])
def test_a_summary_has_ids_rewards_lengths_and_the_beginning_of_the_text(tmp_path: Path, is_old: bool) -> None:
    records = [record(), record(sample=1, reward=None, error="timeout", response="x" * 999)]
    if is_old:
        write_as_before(tmp_path, 1, records)
    else:
        TrajectoryWriter(tmp_path).write(1, records)
    first, second = TrajectoryStore(tmp_path).summaries(1)
    expected = {
        "index": 0,
        "prompt_id": 7,
        "sample": 0,
        "row": 3,
        "tag": "",
        "reward": 1.0,
        "rewards": {"format": None, "answer": 1.0},
        "metrics": {"steps": 2.0},
        "stop": "end_of_turn",
        "error": None,
        "left_out": None,
        "is_chosen": None,
        "parent": None,
        "num_shared": None,
        "num_prompt_tokens": 3,
        "num_response_tokens": 3,
        "num_generated": 2,
        "num_turns": 1,
        "total_generate_s": None,
        "total_environment_s": None,
        "trained_logprob": None,
        "reference_logprob": None,
        "worst_ratio": None,
        "worst_ratio_at": None,
        "worst_ratio_text": None,
        "ratio_by_tenth": None,
        "repeats": None,
        "question": None,
        "answer": None,
        "preview": "2",
        "ending": "2",
    }
    assert first == expected
    changed = {"index": 1, "sample": 1, "reward": None, "error": "timeout"} | dict.fromkeys(
        ("preview", "ending"), "x" * 160
    )
    assert second == expected | changed


@pytest.mark.parametrize("is_old", [False, True])
def test_one_trajectory_is_read_with_all_that_was_written(tmp_path: Path, is_old: bool) -> None:
    records = [record(sample=i) for i in range(3)]
    if is_old:
        write_as_before(tmp_path, 1, records)
    else:
        TrajectoryWriter(tmp_path).write(1, records)
    store = TrajectoryStore(tmp_path)
    found = store.trajectory(1, 2)
    assert found | records[2] == found
    for missing in (-1, 3):
        with pytest.raises(UserError, match=f"no trajectory {missing}"):
            store.trajectory(1, missing)


def test_a_trajectory_has_the_texts_of_its_tokens(tmp_path: Path) -> None:
    TrajectoryWriter(tmp_path).write(1, [record(response="zwölf", response_chars=[2, 0, 3])])
    found = TrajectoryStore(tmp_path).trajectory(1, 0)
    assert (found["response_pieces"], found["prompt_pieces"]) == (["zw", "", "ölf"], None)


def test_any_trajectory_of_a_large_step_is_the_one_that_was_written(tmp_path: Path) -> None:
    written = long_records(200, 1500)
    TrajectoryWriter(tmp_path).write(1, written)
    store = TrajectoryStore(tmp_path)
    for index in (0, 43, 44, 121, 199):
        found = store.trajectory(1, index)
        assert found["sample"] == index
        assert found["response_tokens"] == written[index]["response_tokens"].tolist()
        assert found["logprobs"] == written[index]["logprobs"].tolist()


@pytest.mark.parametrize("is_old", [False, True])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, is_old: bool) -> None:
    records = long_records(2, 100) if not is_old else [record()] * 50
    path = write_as_before(tmp_path, 1, records) if is_old else TrajectoryWriter(tmp_path).write(1, records)
    store, whole, last = TrajectoryStore(tmp_path), path.read_bytes(), len(records) - 1
    for content in (whole[:-20], whole[: len(whole) // 2], b"nonsense" * 9, b"PAR1"):
        path.write_bytes(content)
        for read in (lambda: store.summaries(1), lambda: store.trajectory(1, last), lambda: list(store.records(1))):
            with pytest.raises(UserError, match=path.name):
                read()


def test_what_is_said_again_is_counted() -> None:
    assert repeated_fraction([1, 2, 3]) is None
    assert repeated_fraction(range(1000)) == 0
    assert repeated_fraction([7] * 103) == 0.99
    assert repeated_fraction([1, 2, 3, 4] * 10) == pytest.approx(1 - 4 / 37)


def test_the_ratio_is_known_for_each_tenth_of_what_was_generated(tmp_path: Path) -> None:
    drifted = {
        "response_tokens": [5] * 41,
        "generated": [1] * 20 + [0] + [1] * 20,
        "logprobs": [-1.0] * 41,
        "trained_logprobs": [-1.0] * 37 + [-1.0 + np.log(2)] * 4,
    }
    TrajectoryWriter(tmp_path).write(1, [{**record(), **drifted}])
    [found] = TrajectoryStore(tmp_path).summaries(1)
    assert found["ratio_by_tenth"] == pytest.approx([0] * 9 + [1])
