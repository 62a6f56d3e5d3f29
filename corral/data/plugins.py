"""Loading the Python objects that a recipe names: `module:name`, or `path/to/file.py:name`; and calling them.

Modules are searched where Python searches, then in the current folder. Every failure is one line for the user.
"""

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Awaitable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from corral.recipe.errors import UserError

Result = TypeVar("Result")
MAX_ERROR_CHARACTERS = 500


def load_object(spec: str, setting: str) -> Any:
    """The function or class that `spec` names. `setting` is the recipe's key, for errors."""
    location, _, name = spec.rpartition(":")
    if not location or not name.isidentifier():
        raise UserError(f"{setting}: `{spec}` is neither `module:name` nor `file.py:name`")
    try:
        module = _load_file(Path(location).expanduser()) if location.endswith(".py") else _load_module(location)
    except UserError as error:
        raise UserError(f"{setting}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{setting}: importing `{location}` failed: {error_line(error)}") from error
    if not hasattr(module, name):
        raise UserError(f"{setting}: `{location}` has no `{name}`{did_you_mean(name, dir(module))}")
    return getattr(module, name)


def is_spec(name: str) -> bool:
    """Whether `name` is meant to name something in Python (as opposed to something built in)."""
    return ":" in name


def error_line(error: BaseException) -> str:
    """The traceback's last line, with the place it came from: `ValueError: no digits (rewards.py:12)`."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())[:MAX_ERROR_CHARACTERS]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or isinstance(error, SyntaxError):  # a SyntaxError's text has its own place
        return text
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"


async def without_exit(call: Awaitable[Result]) -> Result:
    """Awaits a user's code. If it calls `sys.exit`, that is an error of its own and ends neither event loop nor run."""
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code})") from error


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean ...?` with the nearest candidate, or nothing."""
    nearest = difflib.get_close_matches(name, list(candidates), n=1)
    return f"; did you mean `{nearest[0]}`?" if nearest else ""


def _load_module(name: str) -> ModuleType:
    _search_also(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the module is there, but something that it imports is not
        raise UserError(f"there is no module `{name}` here or among the installed packages") from error


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        siblings = [sibling.name for sibling in path.parent.glob("*.py")]
        raise UserError(f"no file {path}{did_you_mean(path.name, siblings)}")
    name = f"file {path}"  # can't be taken for a module's name
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    _search_also(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search_also(folder: Path) -> None:
    """Appends to the search path, so that nothing in the user's folder hides an installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
