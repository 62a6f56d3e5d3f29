"""The code of a recipe, for nodes that do not have it: Python files of a folder, and what the recipe names outside of
it; and the recipe, with names and paths that mean the same where these files will be. This needs no Ray."""

import importlib.machinery
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from corral.data.plugins import did_you_mean, is_spec
from corral.data.sources import GENERATORS, is_generated
from corral.hub import is_only_path
from corral.observe.run_folder import holds_run
from corral.recipe.errors import UserError
from corral.recipe.keys import KeyPath, dotted
from corral.recipe.memory import human_bytes
from corral.recipe.schema import Recipe, Section, SourceRows

PYTHON_SUFFIXES = (".py", ".pyi")
TEXT_SUFFIXES = (".txt", ".md", ".jinja", ".jinja2", ".j2")
"""What code reads beside itself: word lists, prompts, templates. Not .json and .yaml, in which people also keep
secrets; those are sent if they are named."""
MAX_TEXT_BYTES = 1 << 20  # of one such file; larger ones are data, which is not sent
MAX_BYTES = 32 << 20
MAX_FILES = 10_000
MAX_SEEN = 200_000  # files that are looked at before the folder is refused
NEVER = ("__pycache__", "node_modules", "site-packages", "venv", "wandb", "mlruns")
ELSEWHERE = ".corral/code"  # in the job's folder: for files that are not below the folder that is sent
NUM_LARGEST = 5
WHAT_TO_DO = "submit from the folder of your code, choose another with --code DIR, or send none with --no-code"
AnySection = TypeVar("AnySection", bound=Section | dict[str, Any])


@dataclass
class JobCode:
    root: Path | None
    files: dict[str, Path] = field(default_factory=dict)  # by their path in the job's folder
    missing: list[str] = field(default_factory=list)  # modules that are not here; the cluster may have them

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())


def collect_code(
    recipe: Recipe, folder: Path, root: Path | None, include: Sequence[str] = ()
) -> tuple[Recipe, JobCode]:
    """The code of a recipe that was submitted from `folder`, with the files of `root`; and the recipe, with names by
    which it is found in the job's folder. Without `root` nothing is sent, and the job runs in `folder`."""
    code = JobCode(root)
    if root is not None:
        if root.resolve() in (Path.home().resolve(), Path("/")):
            raise UserError(f"all of {root} would be sent along: {WHAT_TO_DO}")
        code.files.update(files_of(root, skip=recipe.logging.folder))
        for pattern in include:
            code.files.update(matching_files(root, pattern))
    changes = {key: add_spec(code, dotted(key), spec, folder) for key, spec in code_specs(recipe).items()}
    total = code.num_bytes
    if total > MAX_BYTES or len(code.files) > MAX_FILES:
        largest = sorted(code.files.values(), key=lambda file: file.stat().st_size, reverse=True)[:NUM_LARGEST]
        names = ", ".join(f"{file} ({human_bytes(file.stat().st_size)})" for file in largest)
        raise UserError(
            f"{len(code.files)} files of code are {human_bytes(total)}, and at most {MAX_FILES} files and "
            f"{human_bytes(MAX_BYTES)} are sent along; the largest are {names}. {WHAT_TO_DO.capitalize()}"
        )
    return changed(recipe, changes), code


def code_specs(recipe: Recipe) -> Mapping[KeyPath, str]:
    """Every `module:name` and `file.py:name` of the recipe."""
    names: dict[KeyPath, str | list[str]] = {**recipe.code_names}
    names |= {(*key, "path"): source.path for key, source in recipe.data.all_sources.items()}
    specs = {key: name for key, name in names.items() if isinstance(name, str) and is_spec(name)}
    return {key: name for key, name in specs.items() if name.partition(":")[0] not in ("hf", *GENERATORS)}


def add_spec(code: JobCode, key: str, spec: str, folder: Path) -> str:
    """The name that a spec has in the job's folder, to which its file or module is added where it is missing."""
    location, _, name = spec.rpartition(":")
    if not location.endswith(".py"):
        if code.root is not None:
            add_module(code, location.partition(".")[0], folder)
        return spec
    candidates = [base / Path(location).expanduser() for base in (folder, code.root) if base is not None]
    file = next((candidate.resolve() for candidate in candidates if candidate.is_file()), None)
    if file is None:
        siblings = [sibling.name for sibling in candidates[0].parent.glob("*.py")]
        raise UserError(f"{key}: no file {candidates[0]}{did_you_mean(Path(location).name, siblings)}")
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


def add_module(code: JobCode, name: str, folder: Path) -> None:
    """Adds a module, unless it is in the folder that is sent, or installed: every node must have installed packages."""
    if f"{name}.py" in code.files or any(path.startswith(f"{name}/") for path in code.files):
        return
    found = importlib.machinery.PathFinder.find_spec(name, [*sys.path, str(folder)])
    if found is None:
        if name not in sys.builtin_module_names:
            code.missing.append(name)
    elif found.submodule_search_locations:
        for location in map(Path, found.submodule_search_locations):
            if not is_installed(location):
                code.files.update({f"{name}/{path}": file for path, file in files_of(location).items()})
    elif found.origin is not None and found.origin.endswith(".py") and not is_installed(Path(found.origin)):
        code.files[f"{name}.py"] = Path(found.origin)


def is_installed(path: Path) -> bool:
    packages, standard = {"site-packages", "dist-packages"}, Path(os.__file__).parent.resolve()
    return bool(packages.intersection(path.parts)) or path.resolve().is_relative_to(standard)


def files_of(root: Path, skip: Path | None = None) -> dict[str, Path]:
    """Python files and small texts, by their path below `root`. Not of hidden folders, environments, caches, runs."""
    return {file.relative_to(root).as_posix(): file for file in walk(root, skip)}


def walk(root: Path, skip: Path | None) -> Iterator[Path]:
    num_seen = 0
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not is_left_out(Path(parent, name), skip))
        for name in sorted(names):
            num_seen += 1
            if num_seen > MAX_SEEN:
                raise UserError(f"{root} has more than {MAX_SEEN} files: {WHAT_TO_DO}")
            file = Path(parent, name)
            if name.startswith(".") or file.suffix not in (*PYTHON_SUFFIXES, *TEXT_SUFFIXES) or not file.is_file():
                continue
            if file.suffix in PYTHON_SUFFIXES or file.stat().st_size <= MAX_TEXT_BYTES:
                yield file


def is_left_out(folder: Path, skip: Path | None) -> bool:
    if folder.name.startswith(".") or folder.name in NEVER or (skip is not None and folder.resolve() == skip.resolve()):
        return True
    return (folder / "pyvenv.cfg").exists() or holds_run(folder)


def matching_files(root: Path, pattern: str) -> dict[str, Path]:
    try:
        found = [file for file in root.glob(pattern) if file.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"--include {pattern}: this is not a pattern of files below {root}: {error}") from error
    if not found:
        raise UserError(f"--include {pattern}: no file below {root} matches")
    return {file.relative_to(root).as_posix(): file for file in found}


def with_absolute_paths(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with its relative paths as they are seen from `folder`, so that it means the same in another one. What
    begins with `~` stays: the home directory is the one where the run will be. Paths need not exist here."""
    return changed(recipe, absolute_paths(recipe, folder))


def absolute_paths(recipe: Recipe, folder: Path) -> dict[KeyPath, Any]:
    """The paths of a recipe as they are seen from `folder`, by key."""
    changes: dict[KeyPath, Any] = {
        ("logging", "runs"): absolute_path(recipe.logging.runs, folder),
        ("model", "path"): model_path(recipe.model.path, folder),
    }
    changes |= {(*key, "path"): source_path(source, folder) for key, source in recipe.data.all_sources.items()}
    for role in ("critic", "reference", "reward_model"):
        if (path := getattr(recipe, role).path) is not None:
            changes[role, "path"] = model_path(path, folder)
    for name, service in recipe.cluster.services.items():
        paths = {"retriever": service.retriever, "corpus": service.corpus}
        key = ("cluster", "services", name)
        changes |= {(*key, part): absolute_path(path, folder) for part, path in paths.items() if path is not None}
    if (python := recipe.rollout.engine.python) is not None and "/" in python:
        changes["rollout", "engine", "python"] = absolute_path(python, folder)
    if (prometheus := recipe.logging.prometheus) is not None and prometheus.token_file is not None:
        changes["logging", "prometheus", "token_file"] = absolute_path(prometheus.token_file, folder)
    if recipe.checkpoint.resume not in ("auto", "never"):
        changes["checkpoint", "resume"] = absolute_path(recipe.checkpoint.resume, folder)
    template = recipe.model.chat_template
    if template is not None and "{" not in template and (folder / template).is_file():
        # Workers on other nodes do not see the file, so its text is sent.
        changes["model", "chat_template"] = (folder / template).read_text()
    return changes


def changed(section: AnySection, changes: Mapping[KeyPath, Any]) -> AnySection:
    """A copy with other values at some keys. Values that stay the same do not count as written in the recipe."""
    update: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in changes):
        below = {path[1:]: value for path, value in changes.items() if path[0] == name}
        old = section[name] if isinstance(section, dict) else getattr(section, name)
        new = below[()] if () in below else changed(old, below)
        if new != old:
            update[name] = new
    if isinstance(section, dict):  # sections by names of the user's
        return cast(AnySection, {**section, **update})
    return section.model_copy(update=update)


def absolute_path(path: str, folder: Path) -> str:
    return path if path.startswith("~") else str(folder / path)


def model_path(path: str, folder: Path) -> str:
    """The name of a model on a hub looks like a relative path, and stays."""
    is_folder = is_only_path(path) or (folder / path).is_dir()
    return absolute_path(path, folder) if is_folder else path


def source_path(source: SourceRows, folder: Path) -> str | list[str]:
    if isinstance(source.path, list):
        return [absolute_path(path, folder) for path in source.path]
    if (name := source.hub_name) is not None:
        return f"hf:{folder / name}" if (folder / name).is_dir() else source.path
    is_path = not is_generated(source.path) and not is_spec(source.path)
    return absolute_path(source.path, folder) if is_path else source.path
