"""A trajectory is the same in another process, and takes fewer bytes on its way there."""

import copy
import pickle
from dataclasses import fields

import numpy as np
import pytest

from corral.data.batch import StopReason, Trajectory


def trajectory(tokens: list[int], generated: list[bool], versions: list[int]) -> Trajectory:
    logprobs = -np.random.default_rng(0).random(len(tokens), np.float32)
    return Trajectory(
        tokens=np.array(tokens, np.int64),
        generated=np.array(generated, bool),
        logprobs=logprobs,
        versions=np.array(versions, np.int64),
        turn_rewards=[(1, 0.5)],
        stop=StopReason.TURNS,
        prompt_id=3,
        sample=1,
        row=2,
        metrics={"turns": 2.0},
    )


@pytest.mark.parametrize(
    "original",
    [
        trajectory([5, 6, 7, 8, 9], [False, True, True, False, True], [-1, 3, 4, -1, 4]),
        trajectory([-(2**62), 2**31, 1], [False, False, True], [-1, -1, 0]),  # ids of images are large and negative
        trajectory([-(2**31), 2**31 - 1], [True, True], [0, 0]),
        trajectory([], [], []),
    ],
)
def test_it_is_the_same_after_its_way(original: Trajectory) -> None:
    for came in (pickle.loads(pickle.dumps(original, protocol=5)), copy.deepcopy(original)):
        for field in fields(Trajectory):
            ours, theirs = getattr(original, field.name), getattr(came, field.name)
            if isinstance(ours, np.ndarray):
                assert theirs.dtype == ours.dtype
                assert theirs.flags.writeable
                assert theirs.tolist() == ours.tolist()
            else:
                assert theirs == ours


def test_eight_samples_of_a_thousand_tokens_fit_into_an_answer_of_ray() -> None:
    """`max_direct_call_object_size` is 100 KiB."""
    samples = [trajectory([5] * 1000, [i >= 200 for i in range(1000)], [-1] * 200 + [7] * 800) for _ in range(8)]
    assert len(pickle.dumps(samples, protocol=5)) < 70_000
