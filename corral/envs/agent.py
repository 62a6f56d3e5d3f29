"""Somebody else's agent, written against the OpenAI API, is trained through its `base_url`.

The usual roles are turned round: the agent calls the model. Its first request is the opening of the trajectory, the
model's reply answers it, and what the next request adds is the next observation. So the tokens are those that the
driver has generated and rendered; a request is never tokenised as a whole, and an agent that changes what was said
before has no trajectory. When the agent ends, so does the trajectory.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, get_args

from corral.data.plugins import error_line
from corral.data.rows import Message, Row
from corral.envs.base import StepResult
from corral.envs.chat_api import REFUSED, ChangedHistory, ChatReply, assistant_message, calls_of, new_messages
from corral.envs.endpoint import Exchange, Session
from corral.envs.outside import Agents
from corral.envs.tools.calls import Style
from corral.envs.tools.environment import ToldBy, check_choice, with_instructions
from corral.recipe.errors import UserError
from corral.rewards.calling import is_number, read_result
from corral.rewards.pool import Rewards


class AgentEnv:
    bounds_itself = True
    """The agent has `environment.timeout_s` from each answer to its next request; the reward has its own deadline."""

    def __init__(
        self,
        pool: Rewards,
        shared: Agents,
        timeout_s: float,
        agent: str | None = None,
        command: Sequence[str] | None = None,
        model: str = "corral",
        style: Style = "hermes",
        told_by: ToldBy = "template",
        ignore: Collection[str] = (),
    ) -> None:
        """`style`: how the model calls tools. `told_by`: who tells it of them, as in the `tools` environment.
        `ignore`: fields of a request that are ignored, though they cannot be honoured."""
        self.tools: list[dict[str, Any]] = []
        self._pool, self._agents, self._timeout_s = pool, shared, timeout_s
        self._style, self._told_by = style, told_by
        self._events: asyncio.Queue[Exchange | Future[Any]] = asyncio.Queue()
        self._row: Row | None = None
        self._session: Session | None = None
        self._run: Future[Any] | None = None
        self._pending: Exchange | None = None
        self._counts = (0, 0, False)
        self._turns = self._tool_calls = 0

    @classmethod
    def open_shared(
        cls,
        agent: str | None = None,
        command: Sequence[str] | None = None,
        model: str = "corral",
        style: str = "hermes",
        told_by: str = "template",
        ignore: Collection[str] = (),
    ) -> Agents:
        if (agent is None) is (command is None):
            raise UserError("environment.options must have either `agent` (module:function) or `command` (a program)")
        check_choice("style", style, get_args(Style))
        check_choice("told_by", told_by, get_args(ToldBy))
        for name in ignore:
            check_choice("ignore", name, tuple(REFUSED))
        return Agents(agent, command, model, ignore)

    async def reset(self, row: Row, seed: int) -> list[Message]:
        self._row = row
        loop = asyncio.get_running_loop()

        def deliver(event: "Exchange | Future[Any]") -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._session = self._agents.endpoint.open_session(deliver)
        self._run = self._agents.start(row, self._session)
        self._run.add_done_callback(deliver)
        event = await self._next()
        if not isinstance(event, Exchange):
            result_of(event)
            raise RuntimeError("the agent ended without a request")
        self._pending = event
        request = event.request
        if self._told_by == "system" and request.tools:
            return with_instructions(request.messages, request.tools, self._style)
        self.tools = request.tools
        return request.messages

    def count_turn(self, num_before: int, num_generated: int, is_cut: bool) -> None:
        """Told by the driver before each step, for the `usage` and `finish_reason` that the agent reads."""
        self._counts = (num_before, num_generated, is_cut)

    async def step(self, reply: str) -> StepResult:
        assert self._pending is not None, "step before reset"
        assert self._row is not None
        last = self._pending.request
        message = assistant_message(reply, last, self._style, self._turns)
        self._turns += 1
        self._tool_calls += len(calls_of(message))
        num_before, num_generated, is_cut = self._counts
        finish = "length" if is_cut else "tool_calls" if calls_of(message) else "stop"
        self._pending.answer.set_result(ChatReply(message, finish, num_before, num_generated))
        event = await self._next()
        if not isinstance(event, Exchange):
            return await self._end(result_of(event), reply)
        self._pending = event
        try:
            added = new_messages([*last.messages, message], event.request)
            if event.request.tools != last.tools:
                raise ChangedHistory("the request has other `tools` than the one before")
        except ChangedHistory as error:
            event.refuse(str(error))
            raise
        return StepResult(added, 0.0, done=False)

    async def close(self) -> None:
        self._row = None
        if self._run is not None:
            self._run.cancel()
        if self._session is not None:
            self._session.close()

    def summary(self) -> dict[str, float]:
        return {"turns": float(self._turns), "tool_calls": float(self._tool_calls)}

    async def _next(self) -> "Exchange | Future[Any]":
        """The agent's next request, or its end."""
        try:
            return await asyncio.wait_for(self._events.get(), self._timeout_s)
        except TimeoutError:
            raise TimeoutError(f"the agent neither asked nor ended within {self._timeout_s:g} s") from None

    async def _end(self, result: Any, reply: str) -> StepResult:
        """What the agent says it is worth, or else what the reward function says of the last reply."""
        if is_number(result) or (isinstance(result, Mapping) and "score" in result):
            own = read_result(result)
            return StepResult([], own.score, done=True, metrics=own.metrics)
        assert self._row is not None
        score = await self._pool.score(reply, self._row)
        return StepResult([], score.reward, done=True, metrics=score.metrics, error=score.error)


def result_of(run: "Future[Any]") -> Any:
    try:
        return run.result(timeout=0)
    except Exception as error:
        raise RuntimeError(f"the agent failed: {error_line(error)}") from error
