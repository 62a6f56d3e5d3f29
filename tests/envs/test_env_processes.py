import asyncio
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blocking_environments import Pictured
from deadlines import within
from env_helpers import opened

from corral.data.rows import Row
from corral.envs.base import Env, EnvSet, StepResult
from corral.envs.baselines import run_episode
from corral.recipe.errors import UserError
from corral.recipe.schema import Environment, Rollout

SLOW = f"{Path(__file__).parent}/blocking_environments.py:Slow"
ROW = Row([], None, "", {})


async def played(make: Callable[[], Any], *replies: str, row: Row = ROW) -> tuple[int, StepResult | None]:
    """The process that it was played in, and the last result."""
    env, result = make(), None
    try:
        [first] = await env.reset(row, 3)
        assert first["content"].startswith("seed 3 in ")
        for reply in replies:
            result = await env.step(reply)
    finally:
        await env.close()
    return int(first["content"].split()[-1]), result


def test_the_frame_of_another_process_is_that_of_the_last_step() -> None:
    async def frames(env: Any) -> list[str]:
        await env.reset(ROW, 3)
        found = [env.draw_frame()]
        await env.step("a")
        await env.close()
        return [*found, env.draw_frame()]

    with opened(SLOW, processes=1) as make:
        assert asyncio.run(frames(make())) == ["0 said", "1 said"]


def test_an_environment_without_the_policy_is_closed_all_the_same() -> None:
    closed = []

    class NoPolicy(Env):
        async def close(self) -> None:
            closed.append(self)

    assert asyncio.run(run_episode(NoPolicy, ROW, 0, 1, "best_reply")) is None
    assert len(closed) == 1


def test_pictures_of_another_process_arrive_as_bytes() -> None:
    async def seen(env: Any) -> list[Any]:
        [first] = await env.reset(ROW, 3)
        result = await env.step("a")
        await env.close()
        return [first["images"], result.messages[0]["images"], env.draw_frame()]

    with opened(SLOW.replace("Slow", "Pictured"), processes=1) as make:
        picture = Pictured.PICTURE
        assert asyncio.run(seen(make())) == [[picture], [picture, "a.png"], picture]


def test_a_blocking_environment_is_played_in_another_process_which_is_used_again() -> None:
    with opened(SLOW, processes=1) as make:
        first, result = asyncio.run(played(make, "hello"))
        second, _ = asyncio.run(played(make, "hello"))
    assert first == second != os.getpid()
    assert result == StepResult([{"role": "user", "content": "hello"}], 0.5, False, {"steps": 1.0}, state="1")


def test_each_trajectory_has_an_environment_of_its_own_and_the_summary_outlives_it() -> None:
    with opened(SLOW, processes=1) as make:

        async def play() -> dict[str, float]:
            env = make()
            assert env.last_turns == 1
            await env.reset(ROW, 0)
            for reply in ("a", "b", "end"):
                await env.step(reply)
            await env.close()
            return dict(env.summary())

        assert [asyncio.run(play()) for _ in range(2)] == [{"turns": 3.0}] * 2


def test_several_are_played_at_the_same_time_and_more_wait_for_a_free_process(tmp_path: Path) -> None:
    """A step returns when two of them have begun: the first two, the next two, the last two."""
    options = {"begun": str(tmp_path / "begun")}
    with opened(SLOW.replace("Slow", "InPairs"), processes=2, options=options, timeout_s=within(10)) as make:

        async def play_all() -> list[tuple[int, StepResult | None]]:
            return await asyncio.gather(*(played(make, "a") for _ in range(6)))

        assert len({process for process, _ in asyncio.run(play_all())}) == 2


@pytest.mark.deadline("each call has 0.5 s, which the wait for a process exceeds")
def test_the_wait_for_a_free_process_is_no_part_of_a_call() -> None:
    with opened(SLOW, processes=1, timeout_s=0.5) as make:

        async def play() -> StepResult | None:
            holder = make()
            await holder.reset(ROW, 0)
            waiting = asyncio.ensure_future(played(make, "a"))
            await asyncio.sleep(0.6)
            await holder.close()
            return (await waiting)[1]

        assert asyncio.run(play()) is not None


@pytest.mark.deadline("next to a call that hangs, all others have a second")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("hang", TimeoutError, "the environment took longer than 1 s and its process was killed"),
        ("die", RuntimeError, "the environment's process died: it ended with exit code 7"),
        ("exit", RuntimeError, "SystemExit: 3"),
        ("nonsense", RuntimeError, "TypeError: it returned 'not a result', which is not a StepResult"),
    ],
)
def test_one_that_goes_wrong_costs_its_own_trajectory(fault: str, error: type[Exception], message: str) -> None:
    with opened(SLOW, processes=2, timeout_s=1.0 if fault == "hang" else within(10)) as make:

        async def play_all() -> list[Any]:
            good, bad = ("a", "b", "end"), ("a", fault)
            return await asyncio.gather(
                *(played(make, *said) for said in (good, bad, good, good)), return_exceptions=True
            )

        results = asyncio.run(play_all())
    assert type(results[1]) is error
    assert message in str(results[1])
    assert fault == "die" or re.search(r"\(blocking_environments.py:\d+\)$", str(results[1])), results[1]
    assert all(result[1].done for result in (results[0], *results[2:]))


@pytest.mark.deadline("after a call that hangs, the next ones have a second")
@pytest.mark.parametrize(("fault", "message"), [("hang", "longer than 1 s"), ("raise", "ValueError: no such board")])
def test_a_reset_that_goes_wrong_costs_its_own_trajectory(fault: str, message: str) -> None:
    with opened(SLOW, processes=1, timeout_s=1.0 if fault == "hang" else within(10)) as make:
        with pytest.raises((RuntimeError, TimeoutError), match=message):
            asyncio.run(played(make, row=Row([], fault, "", {})))
        assert asyncio.run(played(make, "a"))[1] is not None


def test_after_its_process_is_gone_an_environment_raises_and_can_be_closed() -> None:
    with opened(SLOW, processes=1) as make:

        async def play() -> None:
            env = make()
            await env.reset(ROW, 0)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="process died"):
                    await env.step("die")
            await env.close()

        asyncio.run(play())


def test_a_trajectory_that_gives_up_waiting_leaves_no_process_taken() -> None:
    with opened(SLOW, processes=1) as make:

        async def play() -> int:
            holder, waiting = make(), make()
            await holder.reset(ROW, 0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting.reset(ROW, 0), 0.1)
            await waiting.close()
            await holder.close()
            return (await asyncio.wait_for(played(make, "a"), within(10)))[0]

        asyncio.run(play())


def test_closing_kills_the_processes_and_calls_in_flight_raise() -> None:
    before = threading.active_count()
    envs = EnvSet({"": Environment(name=SLOW, processes=1)}, {}, Rollout())

    async def play() -> int:
        env = envs.factories[""].make()
        first: Any = await env.reset(ROW, 0)
        call = asyncio.ensure_future(env.step("hang"))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(envs.close)
        with pytest.raises(RuntimeError, match="is closed"):
            await call
        with pytest.raises(RuntimeError, match="is closed"):
            await envs.factories[""].make().reset(ROW, 0)
        return int(first[0]["content"].split()[-1])

    process = asyncio.run(play())
    assert not Path(f"/proc/{process}").exists()
    assert threading.active_count() == before


def test_players_are_asked_where_the_environment_is() -> None:
    with opened(SLOW, processes=1) as make:
        at_random = asyncio.run(run_episode(make, ROW, 1, 3, "random_reply"))
        best = asyncio.run(run_episode(make, ROW, 1, 3, "best_reply"))
    assert at_random is not None
    assert (at_random.turns, at_random.reward) == (3, 1.5)
    assert best is not None
    assert best.turns == 1


def test_arguments_that_can_not_travel_are_refused_by_name() -> None:
    pool: Any = threading.Lock()
    with pytest.raises(UserError, match="argument `pool` can't be sent there"):
        EnvSet({"": Environment(name=SLOW.replace("Slow", "Pooled"))}, {"": pool}, Rollout())


def test_one_whose_constructor_raises_says_so() -> None:
    with (
        opened(SLOW.replace("Slow", "Loads"), processes=1) as make,
        pytest.raises(RuntimeError, match="RuntimeError: no licence"),
    ):
        asyncio.run(make().reset(ROW, 0))
