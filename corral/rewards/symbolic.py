"""The `math` scorer: mathematical equality of the final answer, by math-verify."""

import logging
from typing import Any

from corral.data.answers import after_hashes, last_boxed
from corral.recipe.errors import UserError

try:
    import math_verify
except ImportError as error:
    raise UserError("the `math` reward needs math-verify: pip install 'corral[math]'") from error

# It warns about every call without a timeout. It needs none, since this process is killed at its deadline; and its own
# are signals, which only work in the main thread.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math(response: str, answer: Any, *, format_score: float = 0.0) -> float:
    r"""1 if the final answer (`\boxed{}`, or the last expression) equals the reference; `format_score` if boxed."""
    if answer is None:
        raise ValueError("the row has no answer to compare with; is data.answer_key set?")
    boxed, reference = last_boxed(response), _plain(str(answer))
    # Words, such as \text{Monday}, are no expressions: those are right when they are the same.
    if boxed is not None and "".join(boxed.split()) == "".join(reference.split()):
        return 1.0
    gold = math_verify.parse(f"\\boxed{{{reference}}}", parsing_timeout=None)
    said = math_verify.parse(response, parsing_timeout=None)
    if math_verify.verify(gold, said, timeout_seconds=None):
        return 1.0
    return format_score if boxed is not None else 0.0


def _plain(answer: str) -> str:
    """The final answer alone, when the reference is a worked solution."""
    return (last_boxed(answer) or after_hashes(answer) or answer).strip().strip("$")
