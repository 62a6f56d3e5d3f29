"""From a recipe's source to rows, and from rows to prompts that fit.

Files (parquet, jsonl, json, csv; globs), hub data sets, generated tasks and Python functions all become lists of `Row`.
Whatever is wrong with them is one line of text, with the file and the row.
"""

import csv
import glob
import gzip
import json
import logging
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

import pyarrow
import pyarrow.parquet

from corral.data.batch import BoolArray
from corral.data.generated import arithmetic_rows, board_rows, picture_rows, reasoning_gym_rows
from corral.data.images import for_template, load_images
from corral.data.plugins import did_you_mean, error_line, is_spec, load_object
from corral.data.rows import Row, json_value, number_in, row_from_mapping
from corral.hub import MODELSCOPE, modelscope_folder, require_data_set
from corral.recipe.errors import UserError, install_command, one_line
from corral.recipe.schema import Data, Part, Recipe, Source, SourceRows

logger = logging.getLogger(__name__)

Located = tuple[str, Mapping[str, Any] | UserError]
"""(where a row is, such as `train.jsonl:7` or `train.parquet[6]`; its columns, or why it has none)"""

BOARDS = "boards"
ONE_ENVIRONMENT = {"": 1.0}
Rendered = TypeVar("Rendered")
MAX_LINE = 2**28
"""Most characters of a line of rows; one with images in it has some millions."""
NUM_NAMED = 3  # rows that are named of those that were skipped
GENERATORS = {"arithmetic": arithmetic_rows, "pictures": picture_rows, "reasoning_gym": reasoning_gym_rows}
MAX_CHECKED_SIZE = 10_000
"""Number of generated rows that a plan makes to see whether there are so many."""


def is_generated(path: str) -> bool:
    """Whether a source's path names rows that Corral makes itself, and no file."""
    return path == BOARDS or path.partition(":")[0] in GENERATORS


def load_rows(
    source: Source,
    data: Data,
    mixing: Mapping[str, float] = ONE_ENVIRONMENT,
    *,
    with_completion: bool = False,
    with_rejected: bool = False,
    report: Callable[[str], None] = lambda line: None,
    warn: Callable[[str], None] = logger.warning,
) -> list[Row]:
    """All rows of the source, or of its sources one after the other; of each the first `max_rows` that its filters
    leave. `mixing`: the environments' weights for boards, by tag. `with_completion`: rows have answers to train on;
    `with_rejected`: pairs of them. `report` gets a line about what filters left out, `warn` one about rows that were
    skipped because they cannot be read."""
    answers = {"with_completion": with_completion, "with_rejected": with_rejected}
    rows: list[Row] = []
    for name, one in source.named_sources.items():
        filtered: list[str] = []
        bad: list[str] = []
        own = list(islice(_rows_of(one, data, mixing, answers, name, filtered, bad), one.max_rows))
        if not own:
            left_out = " but those that `filters` leave out" if filtered else ""
            left_out += f" but {len(bad)} that cannot be read, the first: {bad[0]}" if bad else ""
            raise UserError(f"{one.path}: there are no rows in it{left_out}")
        for problem in bad:
            logger.info("skipped: %s", problem)
        if bad:
            warn(f"{name or one.path}: {describe_skipped(bad, len(own) + len(filtered) + len(bad))}")
        if filtered:
            counts = ", ".join(f"{number} by `{column}`" for column, number in Counter(filtered).items())
            num_read = len(own) + len(filtered) + len(bad)
            report(f"{name or one.path}: {len(filtered)} of {num_read} rows left out by `filters` ({counts})")
        rows += own
    return rows


def load_part(
    recipe: Recipe,
    part: Part,
    source: Source,
    warn: Callable[[str], None],
    report: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Loads the rows of a part's source. Where there are several environments, each row has to name one of them."""
    rows = load_rows(
        source,
        recipe.data,
        recipe.mixing_weights(part),
        with_completion=recipe.trains_on_rows,
        with_rejected=recipe.trains_on_pairs,
        report=report,
        warn=warn,
    )
    for row in rows:
        tag = row.extra.get("environment")
        if recipe.environments and (not isinstance(tag, str) or tag not in recipe.environments):
            known = ", ".join(recipe.environments)
            raise UserError(f"{row.where}: the column `environment` is {tag!r}; there are {known}")
    return rows


def check_sizes(data: Data) -> None:
    """Raises where a source of arithmetic cannot be made as it is asked for, so that a plan says it. Sizes that take a
    while are left to the loading of the rows."""
    parts = {"train": data.train} | ({} if data.validation is None else {"validation": data.validation})
    for part, source in parts.items():
        for one in source.named_sources.values():
            kind, _, task = str(one.path).partition(":")
            if kind == "arithmetic" and (one.size or 0) <= MAX_CHECKED_SIZE:
                try:
                    deque(arithmetic_rows(task, one), maxlen=0)
                except UserError as error:
                    raise UserError(f"data.{part}: {error}") from error


def _rows_of(
    source: SourceRows,
    data: Data,
    mixing: Mapping[str, float],
    answers: Mapping[str, bool],
    origin: str,
    filtered: list[str],
    bad: list[str],
) -> Iterator[Row]:
    """Rows that filters leave. Of the others, `filtered` gets the column, and `bad` why a row cannot be read."""
    for where, columns in _read(source, data, mixing):
        try:
            mapping = columns_of(columns)
            if (column := _out_of_range(mapping, source, where)) is not None:
                filtered.append(column)
                continue
            row = row_from_mapping(mapping, data, where, origin=origin, **answers)
        except UserError as error:
            if data.on_bad_row == "error":
                raise
            bad.append(str(error))
        else:
            yield row


def columns_of(found: Mapping[str, Any] | UserError) -> Mapping[str, Any]:
    if isinstance(found, UserError):
        raise found
    return found


def describe_skipped(problems: Sequence[str], num_rows: int) -> str:
    first = "; ".join(problems[:NUM_NAMED])
    others = f"; and {len(problems) - NUM_NAMED} more" if len(problems) > NUM_NAMED else ""
    return f"{len(problems)} of {num_rows} rows skipped (`data.on_bad_row`): {first}{others}"


def _out_of_range(mapping: Mapping[str, Any], source: SourceRows, where: str) -> str | None:
    """The first column by which filters leave a row out."""
    for column, (low, high) in source.filters.items():
        value = number_in(mapping, column, "`filters`", where)
        if (low is not None and value < low) or (high is not None and value > high):
            return column
    return None


def _read(source: SourceRows, data: Data, mixing: Mapping[str, float]) -> Iterator[Located]:
    if isinstance(source.path, list):
        _refuse_unused(source, "files", "split", "subset", "options", "size", "seed")
        return read_files(source.path)
    if source.path == BOARDS:
        _refuse_unused(source, "boards", "split", "subset", "options")
        part: Part = "validation" if source is data.validation else "train"
        boards = board_rows(source, mixing, part)
        return ((f"{BOARDS}[{i}]", _with_column_names(row, data)) for i, row in enumerate(boards))
    if source.hub_name is not None:
        _refuse_unused(source, "a hub data set", "options", "size", "seed")
        return read_hub(source.hub_name, source.subset, source.split)
    kind, _, name = source.path.partition(":")
    if kind in GENERATORS:
        _refuse_unused(source, "a generated task", "split", "subset")
        rows = GENERATORS[kind](name, source)
        return ((f"{kind}:{name}[{i}]", _with_column_names(row, data)) for i, row in enumerate(rows))
    if is_spec(source.path):
        _refuse_unused(source, "a function", "split", "subset", "size", "seed")
        return _read_function(source.path, source.options)
    _refuse_unused(source, "files", "split", "subset", "options", "size", "seed")
    return read_files([source.path])


def _refuse_unused(source: SourceRows, kind: str, *keys: str) -> None:
    for key in keys:
        if getattr(source, key) != SourceRows.model_fields[key].default:
            raise UserError(f"{source.path}: `{key}` would do nothing, because the source is {kind}; leave it out")


def read_files(patterns: list[str]) -> Iterator[Located]:
    """Rows of files, in the order of the patterns; what a glob matches comes in alphabetical order."""
    for path in [path for pattern in patterns for path in _expand(pattern)]:
        is_zipped = path.suffix == ".gz"
        suffix = Path(path.stem).suffix if is_zipped else path.suffix
        reader = READERS.get(suffix)
        if reader is None or (is_zipped and suffix == ".parquet"):
            known = f"{', '.join(READERS)}, and texts as .gz"
            raise UserError(f"{path}: unknown extension `{''.join(path.suffixes)}`; Corral reads {known}")
        try:
            yield from reader(path)
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text") from error
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise UserError(f"{path} can't be read as gzip: {error_line(error)}") from error


def open_text(path: Path, newline: str | None = None) -> IO[str]:
    """A text, zipped or not, without the mark that Windows puts at its beginning."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        raise UserError(f"{path} is a folder; name its files, such as {path / '*.parquet'}")
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if found:
        return found
    if glob.has_magic(pattern):
        raise UserError(f"no file matches {pattern}")
    siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(f"no file {path}{did_you_mean(path.name, siblings)}")


def _read_parquet(path: Path) -> Iterator[Located]:
    with one_line(f"{path} can't be read as parquet"):  # Arrow raises its own errors, OSError and ValueError
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        for index, mapping in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield f"{path}[{index}]", mapping


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    """The lines of a text. A zipped one of 2 MB can have a line that takes all memory."""
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE + 1), ""), start=1):
        if len(line) > MAX_LINE:
            raise UserError(f"{path}:{number}: the line has more than {MAX_LINE} characters; is it a file of rows?")
        yield line


def _read_jsonl(path: Path) -> Iterator[Located]:
    with open_text(path) as file:
        for number, line in enumerate(_lines(file, path), start=1):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    yield where, _object(parse_json(line.strip(), where), where)
                except UserError as error:
                    yield where, error


def _read_csv(path: Path) -> Iterator[Located]:
    """The first line names the columns; every value is text."""
    csv.field_size_limit(2**31 - 1)  # the default is for tables, and cells here are whole texts
    with open_text(path, newline="") as file:  # line breaks inside of quotes stay as they are
        rows = csv.DictReader(_lines(file, path), strict=True)
        try:
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if None in row or None in row.values():
                    expected = f"{len(rows.fieldnames or ())} columns are named in the first line"
                    yield where, UserError(f"{where}: the row has more or fewer values; {expected}")
                else:
                    yield where, row
        except csv.Error as error:
            raise UserError(f"{path}:{rows.reader.line_num}: not valid CSV: {error}") from error


def _read_json(path: Path) -> Iterator[Located]:
    with open_text(path) as file:
        rows = parse_json(file.read(), str(path))
    if not isinstance(rows, list):
        raise UserError(f"{path} must be a list of objects; a file with one object per line is named .jsonl")
    yield from _objects(rows, str(path))


READERS: dict[str, Callable[[Path], Iterator[Located]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
}


def parse_json(text: str, where: str) -> Any:
    try:
        return json_value(text)
    except json.JSONDecodeError as error:
        place = where if error.lineno == 1 else f"{where}:{error.lineno}"
        raise UserError(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: a row must be an object with columns, not {type(value).__name__}")
    return value


def _objects(rows: Iterable[Any], source: str) -> Iterator[Located]:
    for index, row in enumerate(rows):
        where = f"{source}[{index}]"
        try:
            yield where, _object(row, where)
        except UserError as error:
            yield where, error


def read_hub(name: str, subset: str | None, split: str | None) -> Iterator[Located]:
    """Rows of a hub data set, or of a folder in a hub data set's layout (also one written by `save_to_disk`)."""
    where = name if name.startswith(MODELSCOPE) else f"hf:{name}"
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{where} needs the datasets package: {install_command('hub')}") from error
    folder = Path(name).expanduser()
    if where == name:
        folder = modelscope_folder(name, "dataset", "data")
    elif not folder.is_dir():
        require_data_set(name, Path(datasets.config.HF_DATASETS_CACHE))
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
            if subset is not None or (split is not None and not isinstance(loaded, dict)):
                unused = "split" if subset is None else "subset"
                raise UserError(f"{where}: `{unused}` has no effect: what `save_to_disk` wrote there has none")
        else:
            loaded = datasets.load_dataset(str(folder) if folder.is_dir() else name, subset, split=split)
    except UserError:
        raise
    except Exception as error:  # whatever the network, the hub and its file formats come up with
        here = "" if folder.exists() else "; there is no such file here, either"
        raise UserError(f"{where} could not be loaded: {error_line(error)}{here}") from error
    if isinstance(loaded, dict):
        loaded = loaded[_choose_split(where, list(loaded), split)]
    for index, mapping in enumerate(loaded):
        yield f"{where}[{index}]", mapping


def _choose_split(name: str, splits: list[str], split: str | None) -> str:
    if split in splits:
        return split
    if split is None and len(splits) == 1:
        return splits[0]
    problem = "set `split`" if split is None else f"no split `{split}`"
    raise UserError(f"{name}: {problem}; it has {', '.join(splits)}")


def _with_column_names(mapping: dict[str, Any], data: Data) -> dict[str, Any]:
    """A generated row under the column names that the recipe sets for its files."""
    renamed = {data.prompt_key: mapping.pop("prompt"), data.answer_key or "answer": mapping.pop("answer")}
    renamed |= {getattr(data, f"{name}_key"): mapping.pop(name) for name in ("chosen", "rejected") if name in mapping}
    return {**renamed, **mapping}


def _read_function(spec: str, options: dict[str, Any]) -> Iterator[Located]:
    function = load_object(spec, "data source")
    if not callable(function):
        raise UserError(f"{spec} is not a function")
    try:
        yield from _objects(function(**options), spec)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{spec} failed: {error_line(error)}") from error


@dataclass(frozen=True)
class PreparedPrompt:
    row: Row
    tokens: list[int]
    trained: BoolArray | None = None
    """Which tokens are trained on, of a row with its answer. None: a prompt, to be rolled out."""
    rejected: "PreparedPrompt | None" = None
    """The row with its other answer, of a pair."""


@dataclass(frozen=True)
class OverlongCounts:
    num_rows: int
    num_filtered: int
    num_truncated: int
    problems: Sequence[str] = ()
    """Of rows that could not be rendered and were skipped."""


def render_prompt(tokenizer: Any, row: Row, chat: bool, *, needs_tools: bool = False) -> list[int]:
    """The prompt as tokens: through the chat template, ready for the assistant's turn, or its text as it is.
    `needs_tools`: raises where the row's tools and tool calls would not be in it."""
    images = load_images(row.prompt)
    if images and not (chat and getattr(tokenizer, "vision", None)):
        raise UserError(
            "the prompts have images, and the model reads none; leave the images out, or name a vision model"
            if chat
            else "prompts with images need the chat template: remove `data.chat: false`"
        )
    if not chat:
        if needs_tools and (row.tools or any(message.get("tool_calls") for message in row.prompt)):
            raise UserError(f"{row.where} has tools or calls of them, which need the chat template (`data.chat`)")
        text = "\n".join(message["content"] for message in row.prompt)
        tokens: list[int] = tokenizer.encode(text)
        if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
            tokens.pop()  # some tokenizers append an end token to every text; the model continues this one
        return tokens
    if not tokenizer.chat_template:
        raise UserError(
            "the model's tokenizer has no chat template: set `data.chat: false`, or give `model.chat_template`"
        )

    def render(messages: Sequence[Any], tools: list[dict[str, Any]]) -> list[int]:
        try:
            given = {"tools": tools or None, "add_generation_prompt": True, "tokenize": True, "return_dict": False}
            return list(tokenizer.apply_chat_template(for_template(messages), **given))
        except Exception as error:  # templates raise their own, such as "system role not supported"
            why = f"the chat template refuses the prompt {row.prompt!r:.200}: {error_line(error)}"
            raise UserError(f"{row.where}: {why}") from error

    rendered = render(row.prompt, row.tools)
    if needs_tools:
        check_tools(row.prompt, row.tools, render, rendered, row.where)
    try:
        return tokenizer.vision.expand(rendered, images) if images else rendered
    except ValueError as error:  # such as an image that cannot be read
        raise UserError(f"{row.where}: {error}") from error


def check_tools(
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]],
    render: Callable[[Sequence[Mapping[str, Any]], list[dict[str, Any]]], list[int]],
    rendered: list[int],
    where: str,
) -> None:
    """Raises where the template leaves out tools or calls of them: `render` makes the same tokens without them."""

    def is_same(messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]]) -> bool:
        try:
            return render(messages, tools) == rendered
        except UserError:  # it misses them, as one that refuses a result without its call
            return False

    if tools and is_same(messages, []):
        raise UserError(f"{where} has tools, and the model's chat template does not render them")
    if any(message.get("tool_calls") for message in messages):
        without = [{key: value for key, value in one.items() if key != "tool_calls"} for one in messages]
        if is_same(without, tools):
            raise UserError(f"{where} has tool calls, and the model's chat template does not render them")


def try_each(
    rows: Iterable[Row], render: Callable[[Row], Rendered], skip_bad: bool
) -> tuple[list[tuple[Row, Rendered]], list[str]]:
    """Rows with what they render to, and with `skip_bad` why others do not; if none does, the first reason is raised:
    it is not the row's."""
    found: list[tuple[Row, Rendered]] = []
    problems: list[str] = []
    for row in rows:
        try:
            found.append((row, render(row)))
        except UserError as error:
            if not skip_bad:
                raise
            problems.append(str(error))
    if problems and not found:
        raise UserError(problems[0])
    return found, problems


def fit_prompts(
    rows: Iterable[Row], render: Callable[[Row], list[int]], max_tokens: int, overlong: str, *, skip_bad: bool = False
) -> tuple[list[PreparedPrompt], OverlongCounts]:
    """Rendered prompts, each of at most `max_tokens`; `overlong` (`data.overlong`) says what happens to longer ones.
    `skip_bad`: those that cannot be rendered are left out."""
    rendered, problems = try_each(rows, render, skip_bad)
    prompts = [PreparedPrompt(row, tokens) for row, tokens in rendered]
    long = [index for index, prompt in enumerate(prompts) if len(prompt.tokens) > max_tokens]
    if long and overlong == "error":
        raise UserError(
            f"{len(long)} of {len(prompts)} prompts have more tokens than data.max_prompt_tokens: {max_tokens}; "
            f"the first is {prompts[long[0]].row.where} with {len(prompts[long[0]].tokens)}. Raise the limit, or set "
            "data.overlong to filter, truncate_left or truncate_right"
        )
    num_rows = len(prompts) + len(problems)
    counts = OverlongCounts(num_rows, *((len(long), 0) if overlong == "filter" else (0, len(long))), problems)
    if overlong == "filter":
        fitting = [prompt for prompt in prompts if len(prompt.tokens) <= max_tokens]
    else:
        if any(token < 0 for index in long for token in prompts[index].tokens):
            raise UserError(f"data.overlong: {overlong} would cut through images; use `filter`, or a higher limit")
        kept = slice(-max_tokens, None) if overlong == "truncate_left" else slice(max_tokens)
        fitting = [PreparedPrompt(prompt.row, prompt.tokens[kept]) for prompt in prompts]
    if not fitting:
        raise UserError(
            f"no prompt is left: all {len(prompts)} have more tokens than data.max_prompt_tokens: {max_tokens}"
        )
    return fitting, counts
