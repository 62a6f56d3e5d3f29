"""The `reasoning_gym` scorer: each task's own, for rows of a `reasoning_gym:` source."""

import json
from functools import cache
from typing import Any

from corral.recipe.errors import UserError

try:
    import reasoning_gym as gym
except ImportError as error:
    raise UserError("the `reasoning_gym` reward needs reasoning-gym: pip install 'corral[reasoning-gym]'") from error


def reasoning_gym(response: str, extra: dict[str, Any], *, tag: str = "answer") -> float:
    """The task's score of what the last `<answer>...</answer>` holds, or of the whole response if there is no such tag.

    Many tasks give part of the score when the answer is there among other text.
    """
    if "reasoning_gym" not in extra:
        raise ValueError("the row is not from a `reasoning_gym:` source")
    problem = extra["reasoning_gym"]
    said = gym.utils.extract_answer(response, tag_name=tag)
    dataset = _dataset(problem["task"], json.dumps(problem["options"], sort_keys=True))
    return float(dataset.score_answer(response.strip() if said is None else said, problem["entry"]))


@cache
def _dataset(task: str, options: str) -> Any:
    return gym.create_dataset(task, **json.loads(options))
