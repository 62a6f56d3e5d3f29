"""The `math` scorer: mathematical equality of the final answer, by math-verify."""

import logging
from typing import Any

from corral.data.answers import after_hashes, last_boxed, references
from corral.recipe.errors import UserError

try:
    import math_verify
except ImportError as error:
    raise UserError("the `math` reward needs math-verify: pip install 'corral[math]'") from error

# It warns about every call without a timeout. It needs none, since this process is killed at its deadline; and its own
# are signals, which only work in the main thread.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math(
    response: str, answer: Any, *, right: float = 1.0, wrong: float = 0.0, format_score: float | None = None
) -> float:
    r"""`right` if the final answer (`\boxed{}`, or the last expression) equals a reference, else `wrong`; with a
    `format_score`, that for an answer that is not right but in a box."""
    boxed, accepted = last_boxed(response), [_plain(str(one)) for one in references(answer)]
    # Words, such as \text{Monday}, are no expressions: those are right when they are the same.
    if boxed is not None and any("".join(boxed.split()) == "".join(one.split()) for one in accepted):
        return right
    said = math_verify.parse(response, parsing_timeout=None)
    if any(math_verify.verify(_parsed(one), said, timeout_seconds=None) for one in accepted):
        return right
    return wrong if boxed is None or format_score is None else format_score


def _parsed(reference: str) -> Any:
    return math_verify.parse(f"\\boxed{{{reference}}}", parsing_timeout=None)


def _plain(answer: str) -> str:
    """The final answer alone, when the reference is a worked solution."""
    return (last_boxed(answer) or after_hashes(answer) or answer).strip().strip("$")
