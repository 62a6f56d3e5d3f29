"""The judge, against a real HTTP server in this process."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deadlines import within

from corral.data.rows import Row
from corral.recipe.errors import UserError
from corral.recipe.schema import Reward
from corral.rewards.reward_function import Score
from corral.rewards.scorer_pool import ScorerPool

Answer = tuple[int, str]
ROW = Row([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}], "4", "", {})


class Endpoint(ThreadingHTTPServer):
    """Answers as `reply` says, and keeps the requests."""

    request_queue_size = 1024
    daemon_threads = True

    def __init__(self, reply: Callable[[int], Answer]) -> None:
        self.reply, self.requests, self.times, self.headers = reply, [], [], []  # type: ignore[var-annotated]
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        self.server.times.append(time.monotonic())
        self.server.headers.append(dict(self.headers))
        assert self.path == "/v1/chat/completions"
        status, text = self.server.reply(len(self.server.requests))
        answer = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": {"total_tokens": 30}}
        content = json.dumps(answer if status == 200 else {"error": text}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def judged() -> Iterator[Callable[..., tuple[Endpoint, ScorerPool]]]:
    opened: list[tuple[Endpoint, ScorerPool]] = []

    def start(reply: Callable[[int], Answer], settings: dict[str, Any] | None = None, **options: Any) -> Any:
        endpoint = Endpoint(reply)
        options = {"url": endpoint.url, "model": "wise", **options}
        opened.append((endpoint, ScorerPool(Reward(name="judge", options=options, workers=1, **(settings or {})))))
        opened[-1][1].check()
        return opened[-1]

    yield start
    for endpoint, pool in opened:
        pool.close()
        endpoint.shutdown()
        endpoint.server_close()


def score_all(pool: ScorerPool, responses: list[str]) -> list[Score]:
    async def score() -> list[Score]:
        return await asyncio.gather(*(pool.score(response, ROW) for response in responses))

    return asyncio.run(asyncio.wait_for(score(), within(60)))


@pytest.mark.slow
def test_512_judgements_are_asked_for_at_once_in_one_process(judged: Callable[..., Any]) -> None:
    """Each is answered when all of them have arrived."""
    all_here = threading.Barrier(512, timeout=within(30))

    def together(number: int) -> Answer:
        all_here.wait()
        return 200, "Fine. Score: 5"

    endpoint, pool = judged(together, {"concurrency": 512, "timeout_s": within(30)})
    scores = score_all(pool, [f"answer {n}" for n in range(512)])
    assert [(score.reward, score.error) for score in scores] == [(0.5, None)] * 512
    assert len(endpoint.requests) == 512


def test_the_judge_sees_the_rubric_with_question_response_and_answer(judged: Callable[..., Any]) -> None:
    rubric = '{"q": {question}, "a": {answer}, "r": {response}}'
    endpoint, pool = judged(lambda n: (200, "Score: 3, no, **Score: 7**"), rubric=rubric, max_tokens=9)
    [score] = score_all(pool, ["it is {answer}"])
    assert score.reward == 0.7
    assert score.metrics == {"judge_calls": 1, "judge_tokens": 30, "judge_cached": 0, "judge_errors": 0}
    [body] = endpoint.requests
    assert body["messages"] == [{"role": "user", "content": '{"q": 2 + 2?, "a": 4, "r": it is {answer}}'}]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("wise", 0.0, 9)


def test_the_key_comes_from_the_named_variable(judged: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-7")
    endpoint, pool = judged(lambda n: (200, "Score: 10"), api_key_variable="JUDGE_KEY")
    assert score_all(pool, ["x"])[0].reward == 1.0
    assert endpoint.headers[0]["Authorization"] == "Bearer secret-7"


@pytest.mark.parametrize(
    "first",
    [(500, "broken"), (429, "later"), (200, "I can't say."), (200, "Score: 70"), (200, "Score: 3/5")],
)
def test_what_may_be_better_later_is_asked_again(judged: Callable[..., Any], first: Answer) -> None:
    endpoint, pool = judged(lambda n: first if n == 1 else (200, "Score: 2"))
    [score] = score_all(pool, ["x"])
    assert (score.reward, score.error) == (0.2, None)
    assert score.metrics["judge_calls"] == 2
    assert score.metrics["judge_errors"] == 1
    assert endpoint.times[1] - endpoint.times[0] > 0.3


@pytest.mark.parametrize(
    ("text", "reward"),
    [("**Score**: 6", 0.6), ("Score: 7,5", 0.75), ("__Score:__ `8` / 10", 0.8), ("score = 9 out of 10.", 0.9)],
)
def test_a_score_is_read_as_it_is_meant(judged: Callable[..., Any], text: str, reward: float) -> None:
    _, pool = judged(lambda n: (200, text))
    [score] = score_all(pool, ["x"])
    assert (score.reward, score.metrics["judge_calls"]) == (pytest.approx(reward), 1)


def test_nonsense_costs_the_sample_after_its_attempts(judged: Callable[..., Any]) -> None:
    _, pool = judged(lambda n: (200, "Hm."), {"on_error": "drop"}, retries=1)
    [score] = score_all(pool, ["x"])
    assert score.reward is None
    assert score.error is not None
    assert "no judgement after 2 attempts: no score in the judge's answer: 'Hm.'" in score.error
    assert score.metrics == {"judge_calls": 2, "judge_tokens": 60, "judge_cached": 0, "judge_errors": 2}


def test_a_refusal_is_not_asked_again(judged: Callable[..., Any]) -> None:
    endpoint, pool = judged(lambda n: (401, "who are you"))
    [score] = score_all(pool, ["x"])
    assert "after one attempt" in str(score.error)
    assert "answered 401" in str(score.error)
    assert len(endpoint.requests) == 1


@pytest.mark.deadline("next to a call that hangs, all others have 1.5 s")
def test_a_judge_that_hangs_costs_the_deadline_of_its_own_samples(judged: Callable[..., Any]) -> None:
    def hang_for_one(number: int) -> Answer:
        if number == 1:
            time.sleep(20)
        return 200, "Score: 10"

    _, pool = judged(hang_for_one, {"timeout_s": 1.5})
    started = time.monotonic()
    scores = score_all(pool, [f"answer {n}" for n in range(20)])
    assert time.monotonic() - started < within(5)
    assert sorted(score.reward for score in scores if score.reward is not None) == [0.0] + [1.0] * 19


@pytest.mark.slow
def test_answers_are_kept_by_everything_that_decides_them(judged: Callable[..., Any], tmp_path: Path) -> None:
    endpoint, pool = judged(lambda n: (200, f"Score: {n}"), cache=str(tmp_path))
    first, again, other = (score_all(pool, [response])[0] for response in ("x", "x", "y"))
    assert (first.reward, again.reward, other.reward) == (0.1, 0.1, 0.2)
    assert [one.metrics["judge_cached"] for one in (first, again, other)] == [0, 1, 0]
    later, pool = judged(lambda n: (200, "Score: 9"), cache=str(tmp_path), url=endpoint.url)
    assert score_all(pool, ["x"])[0].reward == 0.1
    assert later.requests == []
    _, warmer = judged(lambda n: (200, "Score: 9"), cache=str(tmp_path), url=endpoint.url, temperature=1.0)
    assert score_all(warmer, ["x"])[0].reward == 0.3


@pytest.mark.deadline("each call has a second, which all together exceed")
def test_the_rate_limit_spaces_requests_and_waiting_does_not_count_as_running(judged: Callable[..., Any]) -> None:
    endpoint, pool = judged(lambda n: (200, "Score: 5"), {"timeout_s": 1}, requests_per_minute=300)
    started = time.monotonic()
    scores = score_all(pool, [f"answer {n}" for n in range(11)])
    assert [score.error for score in scores] == [None] * 11
    assert 1.9 < endpoint.times[-1] - started < within(6)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": "localhost:8000"}, "is not an address"),
        ({"rubric": "say a number"}, "must contain `{response}`"),
        ({"pattern": "Score: 1"}, "must have a group"),
        ({"pattern": "(("}, "missing \\)"),
        ({"lowest": 3, "highest": 3}, "must be below"),
        ({"retries": -1}, "at least 0"),
        ({"requests_per_minute": 0}, "must be above 0"),
        ({"api_key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
    ],
)
@pytest.mark.slow
def test_bad_options_are_errors_before_training(options: dict[str, Any], problem: str) -> None:
    pool = ScorerPool(Reward(name="judge", options={"url": "http://127.0.0.1:9/v1", "model": "m", **options}))
    try:
        with pytest.raises(UserError, match=problem):
            pool.check()
    finally:
        pool.close()
