import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from deadlines import within

from corral.data.rows import Row
from corral.recipe.errors import UserError
from corral.recipe.schema import Reward
from corral.rewards.reward_function import Score
from corral.rewards.scorer_pool import ScorerPool

SCORER_OF_SOURCE = Path(__file__).with_name("scorers.py")
ROW = Row([{"role": "user", "content": "?"}], "1", "", {})


@pytest.fixture
def make_pool() -> Iterator[Callable[..., ScorerPool]]:
    pools: list[ScorerPool] = []

    def make(function: str, **settings: Any) -> ScorerPool:
        pools.append(ScorerPool(Reward(name=f"{SCORER_OF_SOURCE}:{function}", **settings)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def score_all(pool: ScorerPool, responses: list[str], row: Row = ROW) -> list[Score]:
    async def score() -> list[Score]:
        return await asyncio.gather(*(pool.score(response, row) for response in responses))

    return asyncio.run(asyncio.wait_for(score(), within(30)))


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + within(20)
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_built_in_function_scores() -> None:
    pool = ScorerPool(Reward(name="number", options={"which": "first"}))
    try:
        pool.check()
        assert score_all(pool, ["1 or 2", "2 or 1"]) == [Score(1.0), Score(0.0)]
    finally:
        pool.close()


def test_two_hundred_calls_at_once_are_all_answered(make_pool: Callable[..., ScorerPool]) -> None:
    pool = make_pool("length")
    responses = ["x" * number for number in range(200)]
    assert score_all(pool, responses) == [Score(float(number)) for number in range(200)]


def test_a_pool_works_in_one_event_loop_after_another(make_pool: Callable[..., ScorerPool]) -> None:
    pool = make_pool("length")
    assert [score_all(pool, [text])[0].reward for text in ("a", "bb")] == [1.0, 2.0]


def test_an_async_function_scores_with_metrics(make_pool: Callable[..., ScorerPool]) -> None:
    assert score_all(make_pool("slow_length"), ["a b c"]) == [Score(5.0, metrics={"words": 3.0})]


def test_a_large_response_arrives_whole(make_pool: Callable[..., ScorerPool]) -> None:
    assert score_all(make_pool("length"), ["x" * 5_000_000])[0].reward == 5_000_000


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("raise", r"^RuntimeError: something broke \(scorers.py:"),
        ("exit", r"^SystemExit: 3 \(scorers.py:"),
        ("die", "exit code 7"),
        ("crash", "signal 11"),
        ("close everything", "died"),
    ],
)
def test_a_function_that_raises_or_dies_costs_one_sample(
    make_pool: Callable[..., ScorerPool], response: str, error: str
) -> None:
    pool = make_pool("act", workers=1, on_error=-0.5)
    [failed, good] = score_all(pool, [response, "fine"])
    assert failed.reward == -0.5
    assert failed.error is not None
    assert re.search(error, failed.error)
    assert good == Score(1.0)


@pytest.mark.deadline("after a call that hangs, the next one has a second")
@pytest.mark.parametrize("response", ["sleep", "hang in C", "spin"])
def test_a_function_that_hangs_costs_one_sample_and_one_timeout(
    make_pool: Callable[..., ScorerPool], response: str
) -> None:
    pool = make_pool("act", workers=1, timeout_s=1)
    pool.check()
    started = time.monotonic()
    [failed, good] = score_all(pool, [response, "fine"])
    assert time.monotonic() - started < within(5)
    line = SCORER_OF_SOURCE.read_text().splitlines().index("def act(response: str, answer: Any) -> float:") + 1
    place = f"scorers.py:{line}"
    assert failed == Score(0.0, f"the reward function took longer than 1 s and was killed ({place})")
    assert good == Score(1.0)


@pytest.mark.deadline("next to a call that hangs, all others have a second")
def test_every_kind_of_failure_among_many_calls_costs_only_its_own_sample(
    make_pool: Callable[..., ScorerPool],
) -> None:
    pool = make_pool("act", timeout_s=1)
    responses = ["fine"] * 60
    responses[5], responses[20], responses[40], responses[50] = "die", "sleep", "raise", "crash"
    failed = {number: score.error for number, score in enumerate(score_all(pool, responses)) if score.error}
    assert list(failed) == [5, 20, 40, 50]
    for error, how in zip(failed.values(), ("process died", "took longer", "something broke", "died"), strict=True):
        assert how in error


@pytest.mark.deadline("after a call that hangs, the next ones have half a second each")
@pytest.mark.parametrize(
    ("response", "how"), [("die", "process died"), ("sleep", "took longer"), ("raise", "something broke")]
)
@pytest.mark.slow
def test_what_is_sent_together_fails_one_by_one(make_pool: Callable[..., ScorerPool], response: str, how: str) -> None:
    pool = make_pool("act", workers=1, timeout_s=0.5 if response == "sleep" else within(10))
    score_all(pool, ["fine"] * 50)  # from now on the function is known to be quick
    responses = ["fine"] * 50
    responses[0] = responses[20] = responses[21] = response
    errors = [score.error for score in score_all(pool, responses)]
    assert [error is None for error in errors] == [response == "fine" for response in responses]
    assert all(how in error for error in errors if error is not None)


def test_many_large_responses_arrive_whole(make_pool: Callable[..., ScorerPool]) -> None:
    pool = make_pool("slow_length", workers=1)
    sizes = [400_000 + number for number in range(60)]
    assert [score.reward for score in score_all(pool, ["x" * size for size in sizes])] == [float(s) for s in sizes]


def test_jobs_of_a_slow_function_go_to_whoever_is_free(make_pool: Callable[..., ScorerPool], tmp_path: Path) -> None:
    """Each of two that are equal returns when another process has the other one."""
    pool = make_pool("slowly_in_pairs", workers=2, timeout_s=within(10))
    scores = score_all(pool, [f"{number // 2}" for number in range(8)], Row([], str(tmp_path), "", {}))
    assert [score.error for score in scores] == [None] * 8


@pytest.mark.deadline("each call has half a second, which all together exceed")
def test_waiting_in_line_does_not_count_as_running(make_pool: Callable[..., ScorerPool]) -> None:
    pool = make_pool("act", workers=1, timeout_s=0.5)
    assert score_all(pool, ["nap"] * 12) == [Score(1.0)] * 12  # at least 0.6 s in all


def test_what_a_function_prints_does_not_disturb(make_pool: Callable[..., ScorerPool]) -> None:
    pool = make_pool("act", workers=1)
    assert score_all(pool, ["print", "fine"]) == [Score(1.0), Score(1.0)]


def test_a_row_that_can_not_be_sent_costs_one_sample(make_pool: Callable[..., ScorerPool]) -> None:
    pool = make_pool("length")
    [score] = score_all(pool, ["x"], Row([], "1", "", {"file": sys.stdout.fileno}))
    assert score.error is not None
    assert "can't be sent to another process" in score.error


def test_a_worker_that_is_killed_while_idle_costs_nothing(make_pool: Callable[..., ScorerPool]) -> None:
    pool = make_pool("process_id", workers=1)
    first = int(score_all(pool, [""])[0].reward)
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: not is_running(first))
    second = score_all(pool, [""])[0]
    assert second.error is None
    assert int(second.reward) != first


def test_workers_do_not_import_the_machine_learning_stack(make_pool: Callable[..., ScorerPool]) -> None:
    [score] = score_all(make_pool("imported"), [""])
    assert score.metrics == {"torch": 0, "transformers": 0, "numpy": 0, "pydantic": 0}


@pytest.mark.parametrize(
    ("function", "settings", "num_before", "responses"),
    [
        ("act", {}, 0, ["sleep", "fine"]),
        ("act", {}, 50, ["sleep"] * 50),  # which are sent together, for the function is known to be quick
        ("act_async", {"concurrency": 4}, 0, ["wait 100"] * 10),
    ],
    ids=["one by one", "together", "async"],
)
def test_close_kills_the_workers_and_ends_calls_in_flight(
    make_pool: Callable[..., ScorerPool], function: str, settings: dict[str, int], num_before: int, responses: list[str]
) -> None:
    pool = make_pool(function, workers=1, **settings)
    pool.check()
    score_all(pool, ["fine"] * num_before)

    async def close_during_calls() -> list[Any]:
        calls = [asyncio.ensure_future(pool.score(response, ROW)) for response in responses]
        await asyncio.sleep(0.2)
        pool.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [str(result) for result in asyncio.run(close_during_calls())] == [f"{pool.label} is closed"] * len(responses)
    assert not any(thread.is_alive() for thread in pool._threads)


def test_a_pool_that_is_refused_by_one_thread_after_the_other_ends_all_of_them(
    make_pool: Callable[..., ScorerPool],
) -> None:
    pool = make_pool("length", workers=2)
    pool.check()
    for _ in range(2):
        pool._refuse(RuntimeError("there is no more room"))
    for thread in pool._threads:
        thread.join(within(20))
        assert not thread.is_alive()


def test_a_cancelled_call_leaves_the_others_alone(make_pool: Callable[..., ScorerPool]) -> None:
    pool = make_pool("slow_length", workers=1)

    async def cancel_some() -> list[Score]:
        calls = [asyncio.ensure_future(pool.score("x", ROW)) for _ in range(20)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        return await asyncio.gather(*calls[1::2])

    assert [score.reward for score in asyncio.run(cancel_some())] == [1.0] * 10


@pytest.mark.deadline("a call has a second to start its child")
def test_what_a_hung_function_started_is_killed_with_it(make_pool: Callable[..., ScorerPool], tmp_path: Path) -> None:
    pool = make_pool("start_a_child_and_hang", workers=1, timeout_s=1)
    note = tmp_path / "pids"
    score_all(pool, ["x"], Row([], str(note), "", {}))
    for process_id in map(int, note.read_text().split()):
        assert wait_until(lambda process_id=process_id: not is_running(process_id))  # type: ignore[misc]


def test_no_worker_outlives_a_killed_run(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    program = f"""
import asyncio
from corral.data.rows import Row
from corral.recipe.schema import Reward
from corral.rewards.scorer_pool import ScorerPool
pool = ScorerPool(Reward(name="{SCORER_OF_SOURCE}:start_a_child_and_hang", timeout_s=1000))
asyncio.run(pool.score("x", Row([], {str(note)!r}, "", {{}})))
"""
    run = subprocess.Popen([sys.executable, "-c", program])
    try:
        assert wait_until(lambda: note.exists() and len(note.read_text().split()) == 2)
        worker, grandchild = map(int, note.read_text().split())
        workers = [child.pid for child in psutil.Process(run.pid).children() if is_running(child.pid)]
        assert worker in workers
        assert len(workers) == 2
    finally:
        run.kill()
        run.wait()
    assert wait_until(lambda: not any(is_running(child) for child in workers))
    os.kill(grandchild, signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{SCORER_OF_SOURCE}:lenght", "has no `lenght`; did you mean `length`?"),
        ("no_such_module_here:score", "there is no module `no_such_module_here`"),
        ("no_such_file.py:score", "no file .*no_such_file.py"),
    ],
)
def test_a_function_that_can_not_be_loaded_is_an_error_before_training(name: str, message: str) -> None:
    pool = ScorerPool(Reward(name=name))
    try:
        with pytest.raises(UserError, match=message.replace("?", r"\?")):
            pool.check()
        with pytest.raises(UserError):
            score_all(pool, ["x"])
    finally:
        pool.close()


def test_a_function_whose_import_kills_the_process_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(9)\n")
    pool = ScorerPool(Reward(name=f"{tmp_path}/deadly.py:score", workers=1))
    try:
        with pytest.raises(UserError, match="died 3 times while loading it: it ended with exit code 9"):
            pool.check()
    finally:
        pool.close()


def test_an_unknown_name_is_an_error_at_once() -> None:
    with pytest.raises(UserError, match="did you mean `exact`"):
        ScorerPool(Reward(name="exat"))


def test_a_breakpoint_in_a_reward_function_says_where_it_would_work(make_pool: Callable[..., ScorerPool]) -> None:
    [score] = score_all(make_pool("stops"), ["any"])
    assert score.error is not None
    assert "`corral train --debug`" in score.error


# --- async functions: many calls at once in a process


def test_five_hundred_calls_run_in_one_process_256_at_a_time(make_pool: Callable[..., ScorerPool]) -> None:
    scores = score_all(make_pool("act_async", workers=1), ["together"] * 512)  # each returns when 256 have begun
    assert [score.reward for score in scores] == [1.0] * 512
    assert len({score.metrics["process"] for score in scores}) == 1


@pytest.mark.deadline("each call has a second, which all together exceed")
def test_concurrency_bounds_the_calls_in_flight_and_waiting_in_line_does_not_count_as_running(
    make_pool: Callable[..., ScorerPool],
) -> None:
    pool = make_pool("act_async", workers=1, concurrency=2, timeout_s=1)
    scores = score_all(pool, ["wait 0.03"] * 48)  # 24 rounds, of 0.05 s at least
    assert [score.error for score in scores] == [None] * 48
    assert max(score.metrics["most"] for score in scores) == 2


@pytest.mark.deadline("next to a call that hangs, all others have a second")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("late", "took longer than 1 s and was cancelled"),
        ("late and stubborn", "took longer than 1 s and was cancelled"),
        ("raise", "RuntimeError: something broke (scorers.py:"),
        ("exit", "SystemExit: 3 (scorers.py:"),
        ("block", "blocked its event loop for longer than 1 s and was killed"),
        ("block in a task", "blocked its event loop for longer than 1 s and was killed"),
        ("hang in C", "blocked its event loop for longer than 1 s and was killed"),
        ("die", "process died: it ended with exit code 7"),
        ("crash", "process died: it was killed by signal 11"),
    ],
)
def test_an_async_call_that_fails_costs_its_own_sample_and_about_one_timeout(
    make_pool: Callable[..., ScorerPool], response: str, error: str
) -> None:
    pool = make_pool("act_async", workers=1, timeout_s=1, on_error=-0.5)
    pool.check()
    responses = ["wait 0.1"] * 100
    responses[30] = response
    started = time.monotonic()
    scores = score_all(pool, responses)
    assert time.monotonic() - started < within(6)
    assert [number for number, score in enumerate(scores) if score.error] == [30]
    assert scores[30].reward == -0.5
    assert scores[30].error is not None
    assert error in scores[30].error
    assert "(scorers.py:" in scores[30].error


def test_calls_that_were_in_flight_with_a_killed_process_are_made_again(make_pool: Callable[..., ScorerPool]) -> None:
    """Nobody knows through which of them it ended: none was computing. They return when one more has begun."""
    pool = make_pool("act_async", workers=1, timeout_s=within(10))
    first = int(score_all(pool, ["fine"])[0].metrics["process"])

    async def kill_meanwhile() -> list[Score]:
        calls = [asyncio.ensure_future(pool.score("together", ROW)) for _ in range(255)]
        await asyncio.sleep(0.3)
        os.kill(first, signal.SIGKILL)
        return await asyncio.gather(*calls, pool.score("together", ROW))

    scores = asyncio.run(kill_meanwhile())
    assert [score.error for score in scores] == [None] * 256
    assert first not in {score.metrics["process"] for score in scores}


def test_concurrency_of_a_function_that_is_not_async_is_an_error(make_pool: Callable[..., ScorerPool]) -> None:
    with pytest.raises(UserError, match="`concurrency` has no effect"):
        make_pool("length", concurrency=8).check()


# --- functions of a group


def test_a_function_that_compares_samples_is_called_once_for_the_group(
    make_pool: Callable[..., ScorerPool], tmp_path: Path
) -> None:
    pool, row = make_pool("ranks"), Row([], str(tmp_path / "calls"), "", {})
    waiting = score_all(pool, ["aaa", "a", "aa"], row)
    assert [(score.reward, score.response) for score in waiting] == [(None, "aaa"), (None, "a"), (None, "aa")]
    assert not (tmp_path / "calls").exists()
    assert asyncio.run(pool.score_group(waiting, row)) == [Score(2.0), Score(0.0), Score(1.0)]
    assert (tmp_path / "calls").read_text() == "3\n"


def test_a_call_for_a_group_that_fails_costs_the_group(make_pool: Callable[..., ScorerPool], tmp_path: Path) -> None:
    pool, row = make_pool("ranks", on_error="drop"), Row([], str(tmp_path / "calls"), "", {})
    scores = asyncio.run(pool.score_group(score_all(pool, ["aaa", "fail"], row), row))
    assert [score.reward for score in scores] == [None, None]
    assert all("one of them says fail" in str(score.error) for score in scores)
