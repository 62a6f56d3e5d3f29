"""The process that runs a reward function: one request after the other, until its socket closes.

It holds no state that matters and may be killed at any moment. Whatever the function prints goes to the run's stderr.
"""

import pickle
from collections.abc import Callable
from typing import Any

from corral.data.plugins import adopt
from corral.rewards.reward_function import call_reward, load_function
from corral.rewards.worker_process import serve_requests


def main(descriptor: int) -> None:
    serve_requests(descriptor, load_scorer)


def load_scorer(message: bytes) -> Callable[[bytes], dict[str, Any]]:
    name, options = pickle.loads(message)
    function = load_function(adopt(*name), options)

    def score(request: bytes) -> dict[str, Any]:
        response, row = pickle.loads(request)
        result = call_reward(function, response, row, options)
        return {"score": result.score, "metrics": result.metrics}

    return score
