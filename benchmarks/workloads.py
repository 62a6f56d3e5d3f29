"""What the GRPO benchmark plays: three workloads and their prompts."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    num_prompts: int
    """Of one step."""
    num_samples: int
    """Of each prompt."""
    num_new: int
    """Tokens of each sample; no sample ends earlier."""
    chat: bool = False

    @property
    def tokens_per_step(self) -> int:
        return self.num_prompts * self.num_samples * self.num_new


WORKLOADS = {
    "short": Workload(num_prompts=4, num_samples=8, num_new=32),
    "gsm8k-like": Workload(num_prompts=4, num_samples=8, num_new=32, chat=True),
    "quickstart": Workload(num_prompts=16, num_samples=8, num_new=4),
}
SMOKE = {
    "short": Workload(num_prompts=2, num_samples=4, num_new=2),
    "gsm8k-like": Workload(num_prompts=2, num_samples=4, num_new=2, chat=True),
    "quickstart": Workload(num_prompts=2, num_samples=4, num_new=2),
}
"""The same in tiny, to see whether everything runs."""

NAMES = ["Natalia", "Weng", "Betty", "Julie", "James", "Mark", "Ken", "Tina", "Albert", "Ruth"]
GOODS = ["clips", "apples", "notebooks", "cookies", "marbles", "postcards", "candles", "pencils"]
PROBLEM = (
    "{name} sold {goods} to {a} friends in April, and then sold half as many {goods} in May. In June {name} bought "
    "{b} more {goods} for {c} dollars each and gave {d} of them to {friend}. How many {goods} did {name} handle "
    "altogether from April to June? Think step by step."
)


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Prompts of about 8 tokens (`short`) or, as a chat, of about 100 (`gsm8k-like`); the same in every run."""
    dice = random.Random(name)
    for _ in range(256):
        if name == "short":
            yield {"prompt": f"{dice.randint(10, 99)} + {dice.randint(10, 99)} =", "answer": ""}
        else:
            person, friend = dice.sample(NAMES, 2)
            a, b, c, d = (dice.randint(10, 99) for _ in range(4))
            yield {
                "prompt": PROBLEM.format(name=person, friend=friend, goods=dice.choice(GOODS), a=a, b=b, c=c, d=d),
                "answer": "",
            }
