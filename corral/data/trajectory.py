"""The one record of what was played: tokens, who wrote them, how likely they were, and what they earned."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class StopReason(StrEnum):
    """Why a trajectory ended."""

    END_OF_TURN = "end_of_turn"
    """The model generated its end-of-turn token and the environment had nothing more to say."""
    STOP_STRING = "stop_string"
    """The model generated one of the recipe's stop strings."""
    LENGTH = "length"
    """The response reached `max_response_tokens`; what it says may be cut off."""
    ENVIRONMENT = "environment"
    """The environment was done, after a turn that ended at its own limit, `max_turn_tokens`."""
    TURNS = "turns"
    """The conversation reached `max_turns` before the environment was done."""
    ERROR = "error"
    """The environment or the reward failed; `Trajectory.error` says how."""


@dataclass
class Trajectory:
    """One growing list of token ids. What is not `generated` (prompt, observations) is never trained on."""

    tokens: IntArray
    generated: BoolArray
    logprobs: FloatArray
    """Of each generated token when it was sampled; 0 elsewhere."""
    versions: IntArray
    """Of the weights that generated each token; -1 elsewhere."""
    turn_rewards: list[tuple[int, float]]
    """(index of the turn's last generated token, its reward)."""
    stop: StopReason
    prompt_id: int
    """Of the prompt, counted over the whole run. Samples of one prompt share it: it is also the group."""
    sample: int
    """0 .. samples_per_prompt - 1."""
    row: int
    """Index of the prompt in its data set."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    tag: str = ""
    """Of its environment, where the recipe has several."""
    turn_states: list[int] = field(default_factory=list)
    """For each turn, a number for the state in which it was taken: equal states have equal numbers."""

    def __post_init__(self) -> None:
        length = len(self.tokens)
        assert len(self.generated) == len(self.logprobs) == len(self.versions) == length

    @property
    def reward(self) -> float:
        return float(sum(reward for _, reward in self.turn_rewards))

    @property
    def prompt_length(self) -> int:
        """Tokens before the first generated one."""
        return int(self.generated.argmax()) if self.generated.any() else len(self.tokens)

    @property
    def num_generated(self) -> int:
        return int(self.generated.sum())
