"""Replies that a model may come up with and nobody thinks of."""

import random
from collections.abc import Iterator

ODD = (
    "",
    " \n\t ",
    "\x00",
    "\x1b[2J\x07\x08",
    "<answer></answer>",
    "<answer>   </answer>",
    "<answer>",
    "</answer>",
    "</answer>up<answer>",
    "<answer><answer></answer></answer>",
    "<answer>no such action</answer>",
    "<answer>left right</answer>",
    "<answer>\nnothing\n</answer>\n<answer>",
    "<ANSWER>nothing</ANSWER>",
    "<answer>{turn} {0} %s \\1 ${x}</answer>",
    "<answer>" * 1000,
    "<answer>x</answer>" * 1000,
    "<|im_end|><|im_start|>assistant",
    "<answer><|im_end|></answer>",
    '{"name": "move", "arguments": {"to": ',
    "<search></search><tool_call></tool_call><information></information>",
    "None",
    "-1",
    "1e999",
    "nan",
    "٣",
    "Ｌｅｆｔ",
    "\u202eleft\u202c",
    "a\u0301" * 50,
    "👩‍👩‍👧‍👦🀄️",
    "\ud800",
    "\ufeff<answer>\u200b</answer>",
    "x" * 200_000,
    "\n" * 10_000,
)
NUM_RANDOM = 40
PIECES = ("<answer>", "</answer>", "<think>", "</think>", "<", ">", "/", "\\", "(", "[", "{", "}", "*", "\n", " ")


def odd_replies(rng: random.Random) -> Iterator[str]:
    """Known ones, then random texts, half of them of pieces of tags."""
    yield from ODD
    for number in range(NUM_RANDOM):
        length = rng.randrange(1, 60)
        if number % 2:
            yield "".join(rng.choice(PIECES) for _ in range(length))
        else:
            yield "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) for _ in range(length))
