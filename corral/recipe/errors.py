"""What a user can fix. The command line shows these as they are, without a traceback, and exits with code 2."""

import unicodedata
from collections.abc import Iterable


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


def first_line(error: BaseException) -> str:
    """Of what others raise, which often goes on for pages."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
