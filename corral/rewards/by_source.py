"""The `by_source` scorer: each row's own, by its `data_source`, as verl chooses.

For sets of rows from several places. A scorer is loaded when the first row that needs it comes: who has no row for
`math` does not need its package.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from corral.data.plugins import is_spec
from corral.data.rows import Message, Row
from corral.rewards.calling import check_name, load_function, offered

SCORERS = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "nq": "em",
    "triviaqa": "em",
    "popqa": "em",
    "hotpotqa": "em",
    "2wikimultihopqa": "em",
    "musique": "em",
    "bamboogle": "em",
}
BEGINNINGS = {"math_dapo": "math", "aime": "math", "numina_": "math", "searchR1_": "em", "arithmetic/": "number"}
"""Of names that are not in `SCORERS`."""


def by_source(
    response: str,
    answer: Any,
    prompt: list[Message],
    extra: dict[str, Any],
    source: str,
    *,
    sources: Mapping[str, str] | None = None,
) -> Any:
    """What the scorer of the row's `data_source` says. `sources` names scorers for others, or instead of ours."""
    own = dict(sources or {})
    for name in own.values():
        if is_spec(name):
            scorer(name)  # a file that is not there is said at once
        else:
            check_name(name)
    function = scorer(name_of_scorer(source, {**SCORERS, **own}))
    return function(**offered(function, response, Row(prompt, answer, source, extra)))


def name_of_scorer(source: str, scorers: Mapping[str, str]) -> str:
    if source in scorers:
        return scorers[source]
    for beginning, name in BEGINNINGS.items():
        if source.startswith(beginning):
            return name
    whose = f"`data_source: {source}`" if source else "a row without `data_source`"
    raise ValueError(
        f"no scorer is known for {whose}; set `environment.reward.name` to one, or name it in its `options.sources`"
    )


@cache
def scorer(name: str) -> Any:
    return load_function(name, {})
