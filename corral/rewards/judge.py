"""The `judge` reward: a language model behind an OpenAI-compatible endpoint scores the response by a rubric.

A judgement is one request; hundreds are in flight at once (`concurrent_calls.py`). Its answer is looked for with a
pattern; an answer without a score in range is nonsense. Nonsense, a status that says "later" and an endpoint that does
not answer are tried again with growing pauses, all within the call's deadline (`reward.timeout_s`); what is still not
known then is an error of this sample, which gets `reward.on_error`.
"""

import asyncio
import hashlib
import inspect
import json
import os
import random
import re
import ssl
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from corral.data.rows import Message
from corral.recipe.errors import UserError
from corral.rewards.concurrent_calls import extend_deadline
from corral.rewards.reward_function import built_in

if TYPE_CHECKING:
    import httpx

RUBRIC = """\
You grade the answer of a student to a question.

Question:
{question}

Reference answer:
{answer}

The student's answer:
{response}

Is it right and complete? Explain in one sentence, then write a last line `Score: N`, with N from 0 (wrong) to
10 (right).
"""
PATTERN = r"(?i)score[\s*_`\"']*[:=][\s*_`\"']*(-?\d+(?:[.,]\d+)?)"
OF = re.compile(r"[*_`\"']*\s*(?:/|out of|of)\s*(\d+(?:\.\d+)?)")
"""What may follow a score: `/ 10`."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
"""Pause before the second attempt, and the longest one; each attempt doubles it."""
NUM_CLIENTS = 32
LATER = (408, 409, 425, 429)
"""Statuses, besides those from 500, after which the same request may succeed later."""


@dataclass(frozen=True)
class JudgeSettings:
    url: str
    model: str
    rubric: str
    pattern: str
    lowest: float
    highest: float
    api_key_variable: str | None
    temperature: float
    max_tokens: int
    retries: int
    attempt_timeout_s: float
    requests_per_minute: float | None
    cache: str | None

    def check(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"`url: {self.url}` is not an address; one is `http://127.0.0.1:8000/v1`")
        if "{response}" not in self.rubric:
            raise UserError("`rubric` must contain `{response}`, the place where the response goes")
        if re.compile(self.pattern).groups < 1:
            raise UserError(f"`pattern: {self.pattern}` must have a group, around the number")
        if self.lowest >= self.highest:
            raise UserError(f"`lowest: {self.lowest:g}` must be below `highest: {self.highest:g}`")
        if self.retries < 0:
            raise UserError(f"`retries: {self.retries}` must be at least 0")
        for name in ("max_tokens", "attempt_timeout_s", "requests_per_minute"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise UserError(f"`{name}: {value:g}` must be above 0")
        if self.api_key_variable is not None and not os.environ.get(self.api_key_variable):
            raise UserError(
                f"`api_key_variable`: the environment variable {self.api_key_variable} is not set here (on a cluster, "
                "`cluster.environment` names variables that workers get)"
            )


@built_in(needs="httpx", extra="judge", check=lambda **options: settings_of(**options).check())
async def judge(
    response: str,
    answer: Any,
    prompt: list[Message],
    *,
    url: str,
    model: str,
    rubric: str = RUBRIC,
    pattern: str = PATTERN,
    lowest: float = 0.0,
    highest: float = 10.0,
    api_key_variable: str | None = None,
    temperature: float = 0.0,
    max_tokens: int = 512,
    retries: int = 4,
    attempt_timeout_s: float = 60.0,
    requests_per_minute: float | None = None,
    cache: str | None = None,
) -> dict[str, float]:
    """From 0 to 1, how the judge scores the response: what the last match of `pattern` in its answer says, between
    `lowest` and `highest`. Its metrics are `judge_calls`, `judge_tokens`, `judge_cached` and `judge_errors`."""
    values = locals()
    settings = JudgeSettings(**{one.name: values[one.name] for one in fields(JudgeSettings)})
    return await _judge_of(asyncio.get_running_loop(), settings).score(response, answer, prompt)


def settings_of(**options: Any) -> JudgeSettings:
    """The settings that these options of `judge` give."""
    parameters = inspect.signature(judge).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    return JudgeSettings(**{**defaults, **options})


@cache
def _judge_of(loop: asyncio.AbstractEventLoop, settings: JudgeSettings) -> "Judge":
    """One for each event loop, since its connections belong to it."""
    return Judge(settings)


class JudgeError(Exception):
    """A judgement that could not be had, with what was spent on it."""

    def __init__(self, message: str, metrics: dict[str, float]) -> None:
        super().__init__(message)
        self.metrics = metrics


class NoJudgement(Exception):
    """An attempt that failed. `is_final`: another would fail in the same way."""

    def __init__(self, message: str, *, is_final: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.is_final, self.retry_after_s = is_final, retry_after_s


@dataclass
class Judge:
    """An endpoint, its connections, its rate limit, and answers that it gave before."""

    settings: JudgeSettings
    next_turn: float = 0.0
    """When the next request may be sent, where there is a rate limit."""

    async def score(self, response: str, answer: Any, prompt: Sequence[Message]) -> dict[str, float]:
        body = self.request_body(response, answer, prompt)
        spent = {"judge_calls": 0.0, "judge_tokens": 0.0, "judge_cached": 0.0, "judge_errors": 0.0}
        path = self.cache_path(body)
        if path is not None and (found := read_cached(path)) is not None:
            try:
                return {**spent, "score": self.read_score(found), "judge_cached": 1.0}
            except NoJudgement:
                pass  # the pattern was another one then: it is asked again
        for attempt in range(self.settings.retries + 1):
            spent["judge_calls"] += 1
            try:
                text, num_tokens = await self.ask(body)
                spent["judge_tokens"] += num_tokens
                score = self.read_score(text)
            except NoJudgement as error:
                spent["judge_errors"] += 1
                if error.is_final or attempt == self.settings.retries:
                    tries = "one attempt" if attempt == 0 else f"{attempt + 1} attempts"
                    raise JudgeError(f"no judgement after {tries}: {error}", spent) from error
                pause_s = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S) * random.uniform(0.8, 1.2)
                await asyncio.sleep(max(pause_s, error.retry_after_s))
            else:
                if path is not None:
                    write_cached(path, body, text)
                return {**spent, "score": score}
        raise AssertionError("the last attempt returns or raises")

    def request_body(self, response: str, answer: Any, prompt: Sequence[Message]) -> dict[str, Any]:
        """Everything that decides the judge's answer, but for the address."""
        values = {
            "question": "\n\n".join(message["content"] for message in prompt if message["role"] != "system"),
            "response": response,
            "answer": "" if answer is None else str(answer),
        }
        # In one pass, and not by str.format: rubrics have braces of their own, and a response may say `{answer}`.
        content = re.sub(r"\{(question|response|answer)\}", lambda match: values[match[1]], self.settings.rubric)
        return {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": self.settings.temperature,
            "max_tokens": self.settings.max_tokens,
        }

    async def ask(self, body: dict[str, Any]) -> tuple[str, float]:
        """The judge's answer and the tokens that it took. NoJudgement if there is none."""
        import httpx

        await self.wait_for_turn()
        try:
            reply = await next(self.clients).post("chat/completions", json=body)
        except httpx.HTTPError as error:
            raise NoJudgement(f"{self.settings.url}: {type(error).__name__} {error}".rstrip()) from error
        if reply.status_code != 200:
            is_final = reply.status_code < 500 and reply.status_code not in LATER
            message = f"{self.settings.url} answered {reply.status_code}: {reply.text[:200]}"
            raise NoJudgement(message, is_final=is_final, retry_after_s=seconds(reply.headers.get("Retry-After")))
        try:
            answer = reply.json()
            text, usage = answer["choices"][0]["message"]["content"], answer.get("usage") or {}
            return str(text or ""), float(usage.get("total_tokens") or 0.0)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise NoJudgement(f"{self.settings.url} answered what is no completion: {reply.text[:200]}") from error

    async def wait_for_turn(self) -> None:
        """Keep to `requests_per_minute`. Waiting for one's turn does not count as running."""
        if self.settings.requests_per_minute is None:
            return
        now = time.monotonic()
        turn = max(self.next_turn, now)
        self.next_turn = turn + 60 / self.settings.requests_per_minute
        extend_deadline(turn - now)
        await asyncio.sleep(turn - now)

    @cached_property
    def clients(self) -> "Iterator[httpx.AsyncClient]":
        """Several, in turn: a client looks at all of its connections for each request, so that 512 requests at once
        take 17 s with one client, and 3 s with 32."""
        import httpx

        key, headers = self.settings.api_key_variable, {}
        if key is not None:
            headers["Authorization"] = f"Bearer {os.environ[key]}"
        context = ssl.create_default_context()
        clients = [
            httpx.AsyncClient(
                base_url=f"{self.settings.url.rstrip('/')}/",
                headers=headers,
                timeout=self.settings.attempt_timeout_s,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                verify=context,
            )
            for _ in range(NUM_CLIENTS)
        ]
        return cycle(clients)

    def read_score(self, text: str) -> float:
        """From 0 to 1. NoJudgement if the answer has no number in range where the pattern looks for it."""
        matches = list(re.finditer(self.settings.pattern, text))
        low, high = self.settings.lowest, self.settings.highest
        try:
            number = float(str(matches[-1][1]).replace(",", "."))
        except (LookupError, ValueError, TypeError):
            raise NoJudgement(f"no score in the judge's answer: {text[-200:]!r}") from None
        if (scale := OF.match(text, matches[-1].end(1))) and float(scale[1]) != high:
            raise NoJudgement(f"the judge's score {number:g} is one of {scale[1]}, and not of {high:g}")
        if not low <= number <= high:
            raise NoJudgement(f"the judge's score {number:g} is not from {low:g} to {high:g}")
        return (number - low) / (high - low)

    def cache_path(self, body: dict[str, Any]) -> Path | None:
        if self.settings.cache is None:
            return None
        key = hashlib.sha256(json.dumps([self.settings.url, body], sort_keys=True).encode()).hexdigest()
        return Path(self.settings.cache).expanduser() / key[:2] / f"{key}.json"


def seconds(header: str | None) -> float:
    """`Retry-After`, where it is a number."""
    return float(header) if header is not None and re.fullmatch(r"\d+(\.\d+)?", header) else 0.0


def read_cached(path: Path) -> str | None:
    """The answer that was written before, if there is a sound one."""
    try:
        answer = json.loads(path.read_text())["answer"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return answer if isinstance(answer, str) else None


def write_cached(path: Path, body: dict[str, Any], answer: str) -> None:
    """In one rename: other processes see a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump({"request": body, "answer": answer}, file)
    os.replace(file.name, path)
