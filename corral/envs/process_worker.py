"""The process that plays environments whose methods block, one at a time, until its socket closes.

It may be killed at any moment; that costs the trajectory it is playing.
"""

import json
import pickle
import random
from typing import Any

from corral.data.plugins import error_line
from corral.envs.base import StepResult, first_state
from corral.envs.registry import find_class
from corral.recipe.errors import UserError
from corral.rewards.messages import Inbox, framed
from corral.rewards.worker import connect, reply


def main(descriptor: int) -> None:
    """Serve the `EnvProcesses` at the other end of the socket `descriptor`."""
    connection = connect(descriptor)
    inbox = Inbox(connection)
    try:
        name, arguments = pickle.loads(inbox.receive())
        try:
            player = Player(find_class(name), arguments)
        except (UserError, SystemExit) as error:
            reply(connection, {"unusable": str(error)})
            return
        reply(connection, {"ready": True})
        while True:
            connection.sendall(framed(player.answer(inbox.receive())))
    except (EOFError, ConnectionError):
        return  # the run is over, or its process is gone


class Player:
    """Has the environment of the present trajectory."""

    def __init__(self, made: Any, arguments: dict[str, Any]) -> None:
        self._made, self._arguments = made, arguments
        self._env: Any = None

    def answer(self, request: bytes) -> bytes:
        try:
            method, values = pickle.loads(request)
            return json.dumps(getattr(self, method)(*values)).encode()
        except BaseException as error:  # also SystemExit: the trajectory failed, the process is well
            return json.dumps({"error": error_line(error)}).encode()

    def reset(self, row: Any, seed: int) -> dict[str, Any]:
        self._env = self._made(**self._arguments)
        messages = self._env.reset(row, seed)
        attributes = {name: getattr(self._env, name) for name in ATTRIBUTES if hasattr(self._env, name)}
        state = first_state(self._env)
        return {"messages": messages, "attributes": attributes, "state": state, "summary": self._summary()}

    def step(self, reply: str) -> dict[str, Any]:
        result = self._env.step(reply)
        if not isinstance(result, StepResult):
            raise TypeError(f"it returned {result!r:.100}, which is not a StepResult")
        return {
            "messages": result.messages,
            "reward": float(result.reward),
            "done": bool(result.done),
            "metrics": {name: float(value) for name, value in result.metrics.items()},
            "problem": result.error,
            "closing": result.closing,
            "state": result.state,
            "summary": self._summary(),
        }

    def close(self) -> dict[str, Any]:
        env, self._env = self._env, None
        if env is not None:
            env.close()
        return {}

    def random_reply(self, seed: int) -> dict[str, Any]:
        return {"said": self._env.random_reply(random.Random(seed))}

    def best_reply(self) -> dict[str, Any]:
        return {"said": self._env.best_reply()}

    def _summary(self) -> dict[str, float]:
        if not hasattr(self._env, "summary"):
            return {}
        return {name: float(value) for name, value in self._env.summary().items()}


ATTRIBUTES = ("inline", "last_turns", "tools")
"""That the driver looks for (`base.py`)."""
