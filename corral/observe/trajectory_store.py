"""The trajectories of a run, one Parquet file for each step and part: written whole, read one by one.

Columns have plain types (texts, numbers, pictures, lists of them), so that pandas, polars and DuckDB read the files as
they are. Those that a list of trajectories shows come first. What is long (text, tokens, and numbers that go with
tokens) is read only of the trajectory that is looked at, with the others of its row group, which is small for that
reason.

Earlier releases wrote JSON lines (`.jsonl.gz`), which are still read.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from corral.observe.run_files import replacing
from corral.recipe.errors import UserError

FILE_NAME = re.compile(r"step_(\d{6,})(?:\.(\w+))?\.(?:parquet|jsonl\.gz)")
PREVIEW_LENGTH = 160
"""Number of characters of the response that a summary has."""
ROW_GROUP_TOKENS = 65536
"""A row group ends with the trajectory that reaches so many tokens. Half as many were not read faster."""

RUN_FACTORS = np.array([1, 1_000_003, 998_244_353, 2_147_483_647], np.int64)
"""Four tokens times these are one number, by which equal runs of tokens are found."""
TENTHS = 10

SUMMARY = {
    "prompt_id": pa.int64(),
    "sample": pa.int32(),
    "row": pa.int64(),
    "tag": pa.string(),
    "reward": pa.float64(),
    "stop": pa.string(),
    "error": pa.string(),
    "left_out": pa.string(),
    "is_chosen": pa.bool_(),
    "parent": pa.int32(),
    "num_shared": pa.int32(),
    "num_prompt_tokens": pa.int32(),
    "num_response_tokens": pa.int32(),
    "num_generated": pa.int32(),
    "num_turns": pa.int32(),
    "total_generate_s": pa.float32(),
    "total_environment_s": pa.float32(),
    "trained_logprob": pa.float64(),
    "reference_logprob": pa.float64(),
    "worst_ratio": pa.float64(),
    "worst_ratio_at": pa.int32(),
    "worst_ratio_text": pa.string(),
    "ratio_by_tenth": pa.list_(pa.float32()),
    "repeats": pa.float64(),
    "question": pa.string(),
    "answer": pa.string(),
    "preview": pa.string(),
    "ending": pa.string(),
}
"""Columns that a list of trajectories is made of, besides those of `BY_NAME`."""
BY_NAME = ("rewards", "metrics")
"""What a record has as a mapping is one column for each name, such as `rewards/format`."""
PER_TURN = {
    "turn_rewards": pa.float64(),
    "turn_starts": pa.int32(),
    "turn_ends": pa.int32(),
    "generate_s": pa.float32(),
    "environment_s": pa.float32(),
}
PER_TOKEN = {
    "prompt_tokens": pa.int64(),
    "prompt_chars": pa.int32(),
    "response_tokens": pa.int64(),
    "response_chars": pa.int32(),
    "generated": pa.int8(),
    "versions": pa.int32(),
    "advantages": pa.float32(),
}
LOGPROBS = ("logprobs", "old_logprobs", "reference_logprobs", "trained_logprobs")
LOGPROBS_AND_VALUES = (*LOGPROBS, "entropies", "values", "returns", "correction")
DETAILS = {
    "tool_errors": pa.list_(pa.string()),
    "prompt": pa.string(),
    "response": pa.string(),
    "frames": pa.list_(pa.string()),
    "pictures": pa.list_(pa.binary()),
    **{name: pa.list_(kind) for name, kind in {**PER_TURN, **PER_TOKEN}.items()},
    **{name: pa.list_(pa.float32()) for name in LOGPROBS_AND_VALUES},
}
"""Columns that are read of one trajectory. `docs/runs-and-checkpoints.md` says what is in each."""
DISTINCT = {"preview", "ending", "response", *LOGPROBS_AND_VALUES}
"""Columns that hardly repeat a value: to look for repetitions would double the time of writing."""


class TrajectoryWriter:
    """Writes the trajectories of whole steps, one file for each; writing a step again replaces it.

    Records are mappings with keys of `SUMMARY`, `BY_NAME` and `DETAILS`. What one does not have is null in the file,
    and if it is of `DETAILS`, missing again in what is read. Numbers of turns and tokens may be arrays.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, step: int, records: Iterable[Mapping[str, Any]], part: str = "") -> Path:
        """`part` separates records of the same step, such as those of a validation."""
        rows = [{**record, **_summary(record)} for record in records]
        path = self.folder / f"step_{step:06d}{part and '.'}{part}.parquet"
        schema = _schema(rows)
        encoded = [leaf for name, leaf in _leaves(schema) if name not in DISTINCT]
        statistics = [leaf for name, leaf in _leaves(schema) if name not in DETAILS and name not in DISTINCT]
        # Nothing of when and where it was written is in the file: equal trajectories are equal files.
        with (
            replacing(path) as file,
            pq.ParquetWriter(
                file,
                schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=encoded,
                write_statistics=statistics,
            ) as writer,
        ):
            for start, end in _row_groups(rows):
                writer.write_table(_table(rows[start:end], schema), row_group_size=end - start)
        path.with_suffix(".jsonl.gz").unlink(missing_ok=True)
        return path

    def truncate_after(self, step: int) -> None:
        """Deletes the steps after `step`: a run that resumes from that checkpoint generates them again."""
        self._delete(lambda own: own > step)

    def delete_before(self, step: int) -> None:
        self._delete(lambda own: own < step)

    def _delete(self, is_unwanted: Callable[[int], bool]) -> None:
        for path in self.folder.glob("step_*"):
            if (match := FILE_NAME.fullmatch(path.name)) is not None and is_unwanted(int(match[1])):
                path.unlink()


def _summary(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: record.get(name) for name in SUMMARY},
        **{kind: {_encodable(name): value for name, value in record.get(kind, {}).items()} for kind in BY_NAME},
        "num_prompt_tokens": len(record.get("prompt_tokens", ())),
        "num_response_tokens": len(record.get("response_tokens", ())),
        "num_generated": int(np.sum(record.get("generated", ()))),
        "num_turns": len(record.get("turn_rewards", ())),
        "total_generate_s": _total(record, "generate_s"),
        "total_environment_s": _total(record, "environment_s"),
        "trained_logprob": _total(record, "trained_logprobs"),
        "reference_logprob": _total(record, "reference_logprobs"),
        **_ratios(record),
        "repeats": repeated_fraction(_generated(record, record.get("response_tokens", ()))),
        "preview": record.get("response", "")[:PREVIEW_LENGTH],
        "ending": record.get("response", "")[-PREVIEW_LENGTH:],
    }


def _total(record: Mapping[str, Any], name: str) -> float | None:
    """The sum over turns, or over generated tokens; other tokens have 0."""
    return float(np.sum(record[name], dtype=np.float64)) if len(record.get(name, ())) else None


def repeated_fraction(tokens: Any) -> float | None:
    """Which part of the runs of four tokens was there before: little in prose, most of them where a model says the same
    again and again. None: there are too few tokens."""
    if len(tokens) < len(RUN_FACTORS):
        return None
    runs = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, np.int64), len(RUN_FACTORS)) @ RUN_FACTORS
    return 1 - len(np.unique(runs)) / len(runs)


def _generated(record: Mapping[str, Any], values: Any) -> Any:
    """The values, of which each token has one, of those that were generated."""
    return np.compress(np.asarray(record.get("generated", ()), bool), values)


def _ratios(record: Mapping[str, Any]) -> dict[str, Any]:
    """Where the trainer is farthest from the engine that sampled: the ratio of the token's probabilities, its index in
    the response and its text. And how far it is from 1 in each tenth of what was generated, in the mean."""
    trained = record.get("trained_logprobs", record.get("old_logprobs"))
    if trained is None or "logprobs" not in record or not np.any(record["generated"]):
        return {}
    log_ratio = np.where(record["generated"], np.subtract(trained, record["logprobs"], dtype=np.float64), 0.0)
    at = int(np.abs(np.nan_to_num(log_ratio, nan=np.inf)).argmax())
    lengths = record.get("response_chars")
    start = 0 if lengths is None else int(np.sum(lengths[:at]))
    text = None if lengths is None else record["response"][start : start + int(lengths[at])]
    deviation = np.abs(np.expm1(_generated(record, log_ratio)))
    tenths = [part.mean() for part in np.array_split(deviation, TENTHS)] if len(deviation) >= TENTHS else None
    return {
        "worst_ratio": float(np.exp(log_ratio[at])),
        "worst_ratio_at": at,
        "worst_ratio_text": text,
        "ratio_by_tenth": tenths,
    }


def _schema(rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    names = [f"{kind}/{name}" for kind in BY_NAME for name in sorted({name for row in rows for name in row[kind]})]
    return pa.schema({**SUMMARY, **dict.fromkeys(names, pa.float64()), **DETAILS})


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """Yields the name of each column, and what Parquet calls that which is in it."""
    for field in schema:
        yield field.name, f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name


def _row_groups(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """Yields the bounds of the row groups: a trajectory belongs to the group that its last token falls into."""
    ends = accumulate(row["num_prompt_tokens"] + row["num_response_tokens"] for row in rows)
    groups = [max(end - 1, 0) // ROW_GROUP_TOKENS for end in ends]
    cuts = [i for i in range(1, len(groups)) if groups[i] != groups[i - 1]]
    return pairwise([0, *cuts, len(rows)]) if rows else iter(())


def _table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    def column(field: pa.Field) -> pa.Array:
        kind, is_named, name = field.name.partition("/")
        if is_named:
            numbers = (row[kind].get(name) for row in rows)
            return pa.array([None if number is None else float(number) for number in numbers], field.type)
        values = [row.get(field.name) for row in rows]
        if pa.types.is_list(field.type) and pa.types.is_primitive(field.type.value_type):
            return _lists(values, field.type)
        try:
            return pa.array(values, field.type)
        except UnicodeEncodeError:
            return pa.array([_encodable(value) for value in values], field.type)

    return pa.Table.from_arrays([column(field) for field in schema], schema=schema)


def _lists(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A column of lists of numbers, made of whole arrays: one by one, a step's tokens would take seconds."""
    dtype = kind.value_type.to_pandas_dtype()
    arrays = [np.asarray(() if value is None else value, dtype) for value in values]
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    is_null = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(offsets, np.concatenate(arrays), type=kind, mask=is_null)


def _encodable(value: Any) -> Any:
    """The value with lone surrogates, which have no UTF-8, in backslash form."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return [_encodable(item) for item in value] if isinstance(value, list) else value


# --- reading


class TrajectoryStore:
    """Reads the folder `trajectories` of a run, which may be written meanwhile, or not be there at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def parts(self) -> list[tuple[int, str]]:
        """Step and part of each file, sorted. The part is empty for what was trained on, else `validation`."""
        return sorted(self._paths())

    def written_at(self, step: int, part: str = "") -> int:
        """When the step's file was written, in nanoseconds."""
        return self._path(step, part).stat().st_mtime_ns

    def summaries(self, step: int, part: str = "", names: Collection[str] | None = None) -> list[dict[str, Any]]:
        """What a list of the trajectories of a step shows of each: its `index`, and the columns of `SUMMARY` with the
        mappings of `BY_NAME`, or only the columns in `names`."""
        path = self._path(step, part)
        with _readable(path):
            if path.suffix == ".gz":
                summaries: Iterable[dict[str, Any]] = map(_summary, _json_lines(path))
            else:
                file = pq.ParquetFile(path)
                there = file.schema_arrow.names
                wanted = [name for name in there if (name not in DETAILS if names is None else name in names)]
                summaries = _records(file.read(wanted))
            return [{"index": index, **summary} for index, summary in enumerate(summaries)]

    def trajectory(self, step: int, index: int, part: str = "") -> dict[str, Any]:
        """The whole record of one trajectory, with the text of each token (`prompt_pieces` and `response_pieces`, None
        in files of earlier releases). Numbers that are not finite are None."""
        path = self._path(step, part)
        with _readable(path):
            if path.suffix == ".gz":
                record = next(islice(_json_lines(path), index, None), None) if index >= 0 else None
            else:
                record = _record_at(pq.ParquetFile(path), index)
        if record is None:
            raise UserError(f"{path} has no trajectory {index}")
        return record | {f"{name}_pieces": _pieces(record, name) for name in ("prompt", "response")}

    def records(self, step: int, part: str = "") -> Iterator[dict[str, Any]]:
        """Yields all trajectories of a step, as they were written."""
        return read_trajectories(self._path(step, part))

    def _path(self, step: int, part: str) -> Path:
        paths = self._paths()
        if (step, part) not in paths:
            there = sorted(number for number, own in paths if own == part)
            raise UserError(f"{self.folder} has no {part or 'training'} trajectories of step {step}; it has {there}")
        return paths[step, part]

    def _paths(self) -> dict[tuple[int, str], Path]:
        # In this order, a Parquet file takes the place of one with JSON lines, which an earlier release wrote.
        found = ((path, FILE_NAME.fullmatch(path.name)) for path in sorted(self.folder.glob("step_*")))
        return {(int(match[1]), match[2] or ""): path for path, match in found if match is not None}


def read_trajectories(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file."""
    with _readable(path):
        if path.suffix == ".gz":
            yield from _json_lines(path)
        else:
            file = pq.ParquetFile(path)
            for group in range(file.num_row_groups):
                yield from _records(file.read_row_group(group))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, EOFError, zlib.error) as error:  # Arrow's own are of these kinds
        raise UserError(f"{path} cannot be read ({error}): it is damaged, or no file of trajectories") from error


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _record_at(file: pq.ParquetFile, index: int) -> dict[str, Any] | None:
    for group in range(file.num_row_groups if index >= 0 else 0):
        num_rows = file.metadata.row_group(group).num_rows
        if index < num_rows:
            return next(_records(file.read_row_group(group).slice(index, 1)))
        index -= num_rows
    return None


def _records(table: pa.Table) -> Iterator[dict[str, Any]]:
    columns = [(name, _values(table.column(name))) for name in table.column_names]
    for i in range(len(table)):
        record: dict[str, Any] = {name: {} for name in BY_NAME}
        for column, values in columns:
            kind, is_named, name = column.partition("/")
            if not is_named and (column in SUMMARY or values[i] is not None):
                record[column] = values[i]
            elif is_named and (kind != "metrics" or values[i] is not None):
                record[kind][name] = values[i]
        yield record


def _values(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column as Python has them, None for those that are null or not finite."""
    kind = column.type
    if not pa.types.is_list(kind) or not pa.types.is_primitive(kind.value_type):
        values = column.to_pylist()
        return [_finite(value) for value in values] if pa.types.is_floating(kind) else values
    found: list[Any] = []
    for chunk in column.chunks:
        # Arrays are a hundred times faster than `to_pylist`.
        numbers, offsets = _numpy(chunk.values), _numpy(chunk.offsets)
        is_mixed = 0 < chunk.null_count < len(chunk)
        is_null = chunk.is_null().to_pylist() if is_mixed else [chunk.null_count > 0] * len(chunk)
        for (start, end), null in zip(pairwise(offsets), is_null, strict=True):
            own = numbers[start:end]
            plain = own.tolist() if np.isfinite(own).all() else [_finite(number) for number in own.tolist()]
            found.append(None if null else plain)
    return found


def _numpy(numbers: pa.Array) -> Any:
    """Arrow's own conversion imports pandas, which takes longer than to read a trajectory."""
    return numbers.to_numpy(zero_copy_only=False) if numbers.null_count else np.from_dlpack(numbers)


def _finite(number: float | None) -> float | None:
    return number if number is not None and np.isfinite(number) else None


def _pieces(record: Mapping[str, Any], name: str) -> list[str] | None:
    """Cuts a text into those of its tokens."""
    lengths = record.get(f"{name}_chars")
    return None if lengths is None else [record[name][a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
