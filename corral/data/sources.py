"""From a recipe's source to rows, and from rows to prompts that fit.

Files (parquet, jsonl, json; globs), hub data sets, generated tasks and Python functions all become lists of `Row`.
Whatever is wrong with them is one line of text, with the file and the row.
"""

import glob
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from corral.data.generated import arithmetic_rows, board_rows, picture_rows, reasoning_gym_rows
from corral.data.images import for_template, load_images
from corral.data.plugins import did_you_mean, error_line, is_spec, load_object
from corral.data.rows import Row, row_from_mapping
from corral.recipe.errors import UserError
from corral.recipe.schema import Data, Part, Source

Located = tuple[str, Mapping[str, Any]]
"""(where a row is, such as `train.jsonl:7` or `train.parquet[6]`; its columns)"""

BOARDS = "boards"
ONE_ENVIRONMENT = {"": 1.0}
GENERATORS = {"arithmetic": arithmetic_rows, "pictures": picture_rows, "reasoning_gym": reasoning_gym_rows}


def load_rows(source: Source, data: Data, mixing: Mapping[str, float] = ONE_ENVIRONMENT) -> list[Row]:
    """All rows of the source, or its first `max_rows`. `mixing`: the environments' weights for boards, by tag."""
    located = islice(_read(source, data, mixing), source.max_rows)
    rows = [row_from_mapping(mapping, data, where) for where, mapping in located]
    if not rows:
        raise UserError(f"{source.path}: there are no rows in it")
    return rows


def _read(source: Source, data: Data, mixing: Mapping[str, float]) -> Iterator[Located]:
    if isinstance(source.path, list):
        _refuse_unused(source, "files", "split", "subset", "options", "size", "seed")
        return read_files(source.path)
    if source.path == BOARDS:
        _refuse_unused(source, "boards", "split", "subset", "options")
        part: Part = "validation" if source is data.validation else "train"
        boards = board_rows(source, mixing, part)
        return ((f"{BOARDS}[{i}]", _with_column_names(row, data)) for i, row in enumerate(boards))
    kind, _, name = source.path.partition(":")
    if kind == "hf" and name:
        _refuse_unused(source, "a hub data set", "options", "size", "seed")
        return read_hub(name, source.subset, source.split)
    if kind in GENERATORS:
        _refuse_unused(source, "a generated task", "split", "subset")
        rows = GENERATORS[kind](name, source)
        return ((f"{kind}:{name}[{i}]", _with_column_names(row, data)) for i, row in enumerate(rows))
    if is_spec(source.path):
        _refuse_unused(source, "a function", "split", "subset", "size", "seed")
        return _read_function(source.path, source.options)
    _refuse_unused(source, "files", "split", "subset", "options", "size", "seed")
    return read_files([source.path])


def _refuse_unused(source: Source, kind: str, *keys: str) -> None:
    for key in keys:
        if getattr(source, key) != Source.model_fields[key].default:
            raise UserError(f"{source.path}: `{key}` would do nothing, because the source is {kind}; leave it out")


def read_files(patterns: list[str]) -> Iterator[Located]:
    """Rows of files, in the order of the patterns; what a glob matches comes in alphabetical order."""
    for path in [path for pattern in patterns for path in _expand(pattern)]:
        reader = READERS.get(path.suffix)
        if reader is None:
            raise UserError(f"{path}: unknown extension `{path.suffix}`; Corral reads {', '.join(READERS)}")
        try:
            yield from reader(path)
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text") from error


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
    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        for index, mapping in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield f"{path}[{index}]", mapping
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} can't be read as parquet: {error}") from error


def _read_jsonl(path: Path) -> Iterator[Located]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, _object(parse_json(line.strip(), where), where)


def _read_json(path: Path) -> Iterator[Located]:
    rows = parse_json(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(rows, list):
        raise UserError(f"{path} must be a list of objects; a file with one object per line is named .jsonl")
    for index, row in enumerate(rows):
        yield f"{path}[{index}]", _object(row, f"{path}[{index}]")


READERS: dict[str, Callable[[Path], Iterator[Located]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
}


def parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = where if error.lineno == 1 else f"{where}:{error.lineno}"
        raise UserError(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from error


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: a row must be an object with columns, not {type(value).__name__}")
    return value


def read_hub(name: str, subset: str | None, split: str | None) -> Iterator[Located]:
    """Rows of a hub data set, or of a folder in a hub data set's layout (also one written by `save_to_disk`)."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"hf:{name} needs the datasets package: pip install 'corral[hub]'") from error
    folder = Path(name).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(str(folder) if folder.is_dir() else name, subset, split=split)
    except Exception as error:  # whatever the network, the hub and its file formats come up with
        raise UserError(f"hf:{name} could not be loaded: {error_line(error)}") from error
    if isinstance(loaded, dict):
        loaded = loaded[_choose_split(name, list(loaded), split)]
    for index, mapping in enumerate(loaded):
        yield f"hf:{name}[{index}]", mapping


def _choose_split(name: str, splits: list[str], split: str | None) -> str:
    if split in splits:
        return split
    if split is None and len(splits) == 1:
        return splits[0]
    problem = "set `split`" if split is None else f"no split `{split}`"
    raise UserError(f"hf:{name}: {problem}; it has {', '.join(splits)}")


def _with_column_names(mapping: dict[str, Any], data: Data) -> dict[str, Any]:
    """A generated row under the column names that the recipe sets for its files."""
    renamed = {data.prompt_key: mapping.pop("prompt"), data.answer_key or "answer": mapping.pop("answer")}
    return {**renamed, **mapping}


def _read_function(spec: str, options: dict[str, Any]) -> Iterator[Located]:
    function = load_object(spec, "data source")
    if not callable(function):
        raise UserError(f"{spec} is not a function")
    try:
        for index, mapping in enumerate(function(**options)):
            yield f"{spec}[{index}]", _object(mapping, f"{spec}[{index}]")
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{spec} failed: {error_line(error)}") from error


@dataclass(frozen=True)
class PreparedPrompt:
    row: Row
    tokens: list[int]


@dataclass(frozen=True)
class OverlongCounts:
    num_rows: int
    num_filtered: int
    num_truncated: int


def render_prompt(tokenizer: Any, row: Row, chat: bool, tools: list[dict[str, Any]] | None = None) -> list[int]:
    """The prompt as tokens: through the chat template, ready for the assistant's turn, or its text as it is."""
    images = load_images(row.prompt)
    if images and not (chat and getattr(tokenizer, "vision", None)):
        raise UserError(
            "the prompts have images, and the model reads none; leave the images out, or name a vision model"
            if chat
            else "prompts with images need the chat template: remove `data.chat: false`"
        )
    if not chat:
        text = "\n".join(message["content"] for message in row.prompt)
        tokens: list[int] = tokenizer.encode(text)
        if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
            tokens.pop()  # some tokenizers append an end token to every text; the model continues this one
        return tokens
    if not tokenizer.chat_template:
        raise UserError(
            "the model's tokenizer has no chat template: set `data.chat: false`, or give `model.chat_template`"
        )
    try:
        rendered = tokenizer.apply_chat_template(
            for_template(row.prompt), tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return tokenizer.vision.expand(rendered, images) if images else list(rendered)
    except Exception as error:  # templates raise their own, such as "system role not supported"
        raise UserError(f"the chat template refuses the prompt {row.prompt!r:.200}: {error_line(error)}") from error


def fit_prompts(
    rows: Iterable[Row], render: Callable[[Row], list[int]], max_tokens: int, overlong: str
) -> tuple[list[PreparedPrompt], OverlongCounts]:
    """Rendered prompts, each of at most `max_tokens`; `overlong` (`data.overlong`) says what happens to longer ones."""
    prompts = [PreparedPrompt(row, render(row)) for row in rows]
    long = [index for index, prompt in enumerate(prompts) if len(prompt.tokens) > max_tokens]
    if long and overlong == "error":
        raise UserError(
            f"{len(long)} of {len(prompts)} prompts have more tokens than data.max_prompt_tokens: {max_tokens}; "
            f"the first is row {long[0]} with {len(prompts[long[0]].tokens)}. Raise the limit, or set data.overlong to "
            "filter, truncate_left or truncate_right"
        )
    counts = OverlongCounts(len(prompts), *((len(long), 0) if overlong == "filter" else (0, len(long))))
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
