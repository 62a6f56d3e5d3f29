"""Loading the Python objects that a recipe names: `module:name`, or `path/to/file.py:name`; and calling them.

Modules are searched where Python searches, then in the current folder. Every failure is one line for the user.

Objects that a Python program hands over (`corral.train(reward=...)`) get a name too. One that other processes can
import has that name; any other is put into a module that exists in memory only, under which it is found again here,
and is sent as code to the processes on this machine that run it.
"""

import difflib
import importlib
import importlib.util
import pickle
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from corral.recipe.errors import UserError

MAX_ERROR_CHARACTERS = 500
IN_MEMORY = "corral_objects"
"""The module, in memory only, of objects that cannot be imported."""
PLACE = re.compile(r"\(([^()]+:\d+)\)$")
"""How a text of `error_line` ends."""
EXCEPTION = re.compile(r"\b\w+(?:Error|Exception|Exit|Interrupt)\b")
FOLDERS = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
BROKEN_CODE = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError")
NOT_USERS = (*(f"{folder}/" for folder in FOLDERS), "<frozen", "<string>")
"""How the names of files begin that are Corral's, Python's or installed, and not the user's."""


def load_object(spec: str, setting: str) -> Any:
    """The function or class that `spec` names. `setting` is the recipe's key, for errors."""
    location, _, name = spec.rpartition(":")
    if not location or not name.isidentifier():
        raise UserError(f"{setting}: `{spec}` is neither `module:name` nor `file.py:name`")
    if location == IN_MEMORY and not hasattr(sys.modules.get(IN_MEMORY), name):
        raise UserError(f"{setting}: `{name}` was given as a Python object, and only the program that gave it has it")
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


def name_object(value: Any, name: str) -> str:
    """The spec under which `load_object` finds the object; `name` is used where it cannot be imported."""
    if is_importable(value):
        return f"{value.__module__}:{value.__name__}"
    module = sys.modules.setdefault(IN_MEMORY, ModuleType(IN_MEMORY))
    setattr(module, name, value)
    return f"{IN_MEMORY}:{name}"


def is_importable(value: Any) -> bool:
    """Whether another process finds the object by its module and name: not what a notebook, the program that was
    started, or a function has defined, nor what was loaded from a file outside of Python's search path."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    if module in ("__main__", IN_MEMORY) or not all(part.isidentifier() for part in [*module.split("."), name]):
        return False
    return getattr(sys.modules.get(module), name, None) is value


def portable(spec: str) -> tuple[str, bytes | None]:
    """The spec, with the object's code where other processes cannot import it; `adopt` takes both there."""
    location, _, name = spec.rpartition(":")
    if location != IN_MEMORY:
        return spec, None
    import cloudpickle

    try:
        return spec, cloudpickle.dumps(load_object(spec, name))
    except Exception as error:
        raise UserError(f"`{name}` can't be sent to the process that is to run it: {error_line(error)}") from error


def adopt(spec: str, code: bytes | None) -> str:
    """Makes an object that another process sent known here, and returns its spec."""
    if code is not None:
        module = sys.modules.setdefault(IN_MEMORY, ModuleType(IN_MEMORY))
        setattr(module, spec.rpartition(":")[2], pickle.loads(code))
    return spec


def error_line(error: BaseException) -> str:
    """The traceback's last line, with the place it came from: `ValueError: no digits (rewards.py:12)`. The place is the
    innermost frame in a file of the user's, or the innermost one where none is."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())[:MAX_ERROR_CHARACTERS]
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) or PLACE.search(text):  # the text has a place: of a file, or of another process
        return text
    if hasattr(error, "place"):
        return with_place(text, error.place)
    if not frames:
        return text
    users = [frame for frame in frames if is_users_file(frame.filename)]
    frame = (users or frames)[-1]
    return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


def is_users_file(filename: str) -> bool:
    """Whether code is the user's, and not of Corral, of Python, or installed with packages."""
    return not filename.startswith(NOT_USERS)


def place_of(function: Any) -> str | None:
    """Where a function of the user's is defined: `rewards.py:12`. None: it is not the user's, or nobody knows."""
    method = getattr(function, "__call__", None)  # noqa: B004 - of an object that can be called
    code = getattr(function, "__code__", None) or getattr(method, "__code__", None)
    if code is None or not is_users_file(code.co_filename):
        return None
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def with_place(text: str, place: str | None) -> str:
    return text if place is None else f"{text} ({place})"


@contextmanager
def blamed_on(function: Any) -> Iterator[None]:
    """For errors about what a function returned, which have no frame in it: their place is where it is defined."""
    try:
        yield
    except (TypeError, ValueError) as error:
        error.place = place_of(function)  # type: ignore[union-attr]
        raise


def is_broken_code(text: str) -> bool:
    """Whether a text of `error_line` is about a name or module that is missing, whatever the arguments were."""
    return any(name in BROKEN_CODE for name in EXCEPTION.findall(text))


def error_kind(text: str) -> str:
    """What texts of `error_line` have in common that say the same of different samples: the exceptions and the place;
    without a place, all but numbers and what is quoted."""
    place = PLACE.search(text)
    if place is not None:
        return f"{' '.join(EXCEPTION.findall(text))} {place[1]}"
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?", "_", text)


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
