"""What a user can fix. The command line shows these as they are, without a traceback, and exits with code 2."""

from collections.abc import Iterable


class UserError(Exception):
    """Something the user can fix; shown as one line, exit code 2."""


class RunError(Exception):
    """A run that cannot go on; the message says why, in one line, exit code 1. What was saved stays usable."""


class RecipeError(UserError):
    """All that is wrong with a recipe, one line per problem."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


def first_line(error: BaseException) -> str:
    """Of what others raise, which often goes on for pages."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
