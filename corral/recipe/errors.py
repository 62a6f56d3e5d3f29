"""What a user can fix. The command line shows these as they are, without a traceback, and exits with code 2."""

import logging
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)


class UserError(Exception):
    """Something the user can fix; shown as one line, exit code 2."""


class RunError(Exception):
    """A run that cannot go on; the message says why, in one line, exit code 1. What was saved stays usable."""


class RunInterrupted(BaseException):
    """Ctrl-C has stopped a run, which has saved what there was and printed how to continue; exit code 130."""


class RecipeError(UserError):
    """All that is wrong with a recipe, one line per problem."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


def without_controls(text: str) -> str:
    """The text with what could move the cursor, color the terminal or hide something as its code. Names of files, keys
    of recipes and answers of servers are parts of messages, and not all of them are ours."""
    return "".join(char.encode("unicode_escape").decode() if _is_control(char) else char for char in text)


def _is_control(char: str) -> bool:
    # The two joiners are part of how Persian, Hindi and emoji are written.
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") and char not in "\u200c\u200d\n\t"


def install_command(extra: str) -> str:
    """The command that installs what an extra of Corral needs. Corral is on no index: pip takes the one that is
    installed, of a wheel or of a clone, and reads the extra there. One that is only on Python's path is named by its
    folder."""
    from importlib.metadata import PackageNotFoundError, metadata

    extras = list[str]()
    with suppress(PackageNotFoundError):
        extras = metadata("corral").get_all("Provides-Extra", [])
    return pip_install(f"{'corral' if extra in extras else Path(__file__).parents[2]}[{extra}]")


def pip_install(*words: str) -> str:
    """The command that installs into this Python, which need not be the one that `pip` in a shell belongs to."""
    python = Path(sys.executable)
    is_in_shell = Path(shutil.which("pip") or "").parent == python.parent
    with suppress(ValueError):
        python = python.relative_to(Path.cwd())
    pip = ["pip"] if is_in_shell else [str(python), "-m", "pip"]
    return shlex.join([*pip, "install", *words])


@contextmanager
def one_line(problem: str) -> Iterator[None]:
    """Turns whatever a library raises of a file that somebody else has written into a UserError: no list of exceptions
    that a parser, a constructor or a model's code may raise is ever complete."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        logger.info("%s", problem, exc_info=True)  # to the run's log
        raise UserError(f"{problem}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Of what others raise, which often goes on for pages."""
    if isinstance(error, MemoryError):
        return "there is too little memory"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError) and " " not in str(error):
        return f"there is no {error}"
    first, _, rest = str(error).strip().partition("\n")
    if first.endswith(":") and rest:  # "Validation error for field 'rms_norm_eps':"
        first += " " + rest.strip().partition("\n")[0]
    return first or type(error).__name__
