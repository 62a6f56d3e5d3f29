"""The code that goes with a job: the Python files of a folder, and what the recipe names outside of it."""

import importlib.machinery
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corral.cluster.jobs.paths import changed
from corral.data.plugins import did_you_mean, is_spec
from corral.data.sources import GENERATORS
from corral.observe.run_folder import holds_run
from corral.recipe.errors import UserError
from corral.recipe.keys import KeyPath, dotted
from corral.recipe.schema import Recipe

PYTHON = (".py", ".pyi")
TEXTS = (".txt", ".md", ".jinja", ".jinja2", ".j2")
"""What code reads beside itself: word lists, prompts, templates. Not .json and .yaml, in which people also keep what is
secret; those are sent if they are named."""
MAX_TEXT_BYTES = 1 << 20
"""Of one such file; larger ones are data, which is not sent."""
MAX_BYTES = 32 << 20
MAX_FILES = 10_000
MAX_SEEN = 200_000
"""Files that are looked at before it is said that this is not a folder of code."""
NEVER = ("__pycache__", "node_modules", "site-packages", "venv", "wandb", "mlruns")
ELSEWHERE = ".corral/code"
"""In the job's folder: for files that are not below the folder that is sent."""
NAMED_LARGEST = 5
WHAT_TO_DO = "submit from the folder of your code, choose another with --code DIR, or send none with --no-code"


@dataclass
class Code:
    """Files by their path in the job's folder."""

    root: Path | None
    files: dict[str, Path] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Modules that are not here; the cluster may have them."""

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())


def gather(recipe: Recipe, folder: Path, root: Path | None, include: Sequence[str] = ()) -> tuple[Recipe, Code]:
    """The code of a recipe that was submitted from `folder`, with the files of `root`; and the recipe, with names by
    which it is found in the job's folder. Without `root` nothing is sent, and the job runs in `folder`."""
    code = Code(root)
    if root is not None:
        if root.resolve() in (Path.home().resolve(), Path("/")):
            raise UserError(f"all of {root} would be sent along: {WHAT_TO_DO}")
        code.files.update(files_of(root, skip=Path(recipe.logging.runs)))
        for pattern in include:
            code.files.update(matching(root, pattern))
    changes = {key: placed(code, dotted(key), spec, folder) for key, spec in named_code(recipe).items()}
    check_size(code)
    return changed(recipe, changes), code


def named_code(recipe: Recipe) -> Mapping[KeyPath, str]:
    """Every `module:name` and `file.py:name` of the recipe."""
    names: dict[KeyPath, str | list[str]] = {("data", "train", "path"): recipe.data.train.path, **recipe.code_names}
    if recipe.data.validation is not None:
        names["data", "validation", "path"] = recipe.data.validation.path
    texts = {key: name for key, name in names.items() if isinstance(name, str)}
    return {key: name for key, name in texts.items() if is_spec(name) and not is_data(name)}


def is_data(name: str) -> bool:
    return name.partition(":")[0] in ("hf", *GENERATORS)


def placed(code: Code, key: str, spec: str, folder: Path) -> str:
    """The name of the same thing in the job's folder, to which it is added where it is not there yet."""
    location, _, name = spec.rpartition(":")
    if not location.endswith(".py"):
        if code.root is not None:
            add_module(code, location.partition(".")[0], folder)
        return spec
    file = find_file(key, Path(location).expanduser(), folder, code.root)
    if code.root is None:
        return f"{file}:{name}"
    if file.is_relative_to(code.root.resolve()):
        inside = file.relative_to(code.root.resolve()).as_posix()
        code.files[inside] = file
        return f"{inside}:{name}"
    number = len({path.split("/")[2] for path in code.files if path.startswith(f"{ELSEWHERE}/")})
    beside = f"{ELSEWHERE}/{number}"
    code.files.update({f"{beside}/{other.name}": other for other in file.parent.glob("*.py")})
    return f"{beside}/{file.name}:{name}"


def find_file(key: str, file: Path, folder: Path, root: Path | None) -> Path:
    places = [folder / file, *([] if root is None else [root / file])]
    for place in places:
        if place.is_file():
            return place.resolve()
    siblings = [sibling.name for sibling in places[0].parent.glob("*.py")]
    raise UserError(f"{key}: no file {places[0]}{did_you_mean(file.name, siblings)}")


def add_module(code: Code, name: str, folder: Path) -> None:
    """Unless it is in the folder that is sent, or installed: installed packages are expected on every node."""
    if f"{name}.py" in code.files or any(path.startswith(f"{name}/") for path in code.files):
        return
    found = importlib.machinery.PathFinder.find_spec(name, [*sys.path, str(folder)])
    if found is None:
        if name not in sys.builtin_module_names:
            code.missing.append(name)
    elif found.submodule_search_locations:
        for place in map(Path, found.submodule_search_locations):
            if not is_installed(place):
                code.files.update({f"{name}/{path}": file for path, file in files_of(place).items()})
    elif found.origin is not None and found.origin.endswith(".py") and not is_installed(Path(found.origin)):
        code.files[f"{name}.py"] = Path(found.origin)


def is_installed(path: Path) -> bool:
    standard = Path(os.__file__).parent.resolve()
    packages = {"site-packages", "dist-packages"}
    return bool(packages.intersection(path.parts)) or path.resolve().is_relative_to(standard)


def files_of(root: Path, skip: Path | None = None) -> dict[str, Path]:
    """Python files and small texts, by their path below `root`. Not of hidden folders, environments, caches, runs."""
    return {file.relative_to(root).as_posix(): file for file in walk(root, skip)}


def walk(root: Path, skip: Path | None) -> Iterator[Path]:
    seen = 0
    for place, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not is_left_out(Path(place, name), skip))
        for name in sorted(names):
            file = Path(place, name)
            seen += 1
            if seen > MAX_SEEN:
                raise UserError(f"{root} has more than {MAX_SEEN} files: {WHAT_TO_DO}")
            if not name.startswith(".") and is_sent(file):
                yield file


def matching(root: Path, pattern: str) -> dict[str, Path]:
    try:
        found = [file for file in root.glob(pattern) if file.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"--include {pattern}: this is not a pattern of files below {root}: {error}") from error
    if not found:
        raise UserError(f"--include {pattern}: no file below {root} matches")
    return {file.relative_to(root).as_posix(): file for file in found}


def is_left_out(folder: Path, skip: Path | None) -> bool:
    if folder.name.startswith(".") or folder.name in NEVER or (skip is not None and folder.resolve() == skip.resolve()):
        return True
    return (folder / "pyvenv.cfg").exists() or holds_run(folder)


def is_sent(file: Path) -> bool:
    if file.suffix in PYTHON:
        return file.is_file()
    return file.suffix in TEXTS and file.is_file() and file.stat().st_size <= MAX_TEXT_BYTES


def check_size(code: Code) -> None:
    total = code.num_bytes
    if total <= MAX_BYTES and len(code.files) <= MAX_FILES:
        return
    largest = sorted(code.files.values(), key=lambda file: file.stat().st_size, reverse=True)[:NAMED_LARGEST]
    names = ", ".join(f"{file} ({size_in_words(file.stat().st_size)})" for file in largest)
    raise UserError(
        f"{len(code.files)} files of code are {size_in_words(total)}, and at most {MAX_FILES} files and "
        f"{size_in_words(MAX_BYTES)} are sent along; the largest are {names}. {WHAT_TO_DO.capitalize()}"
    )


def size_in_words(num_bytes: int) -> str:
    power = min(3, max(0, num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes / 1024**power:.3g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
