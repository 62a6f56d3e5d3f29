"""A teacher behind an endpoint: log-probs of the policy's tokens from another server (vLLM, `corral serve`).

Tokens travel as numbers, and numbers mean different texts to models with different tokens. So every answer has to name
the token that each log-prob is of, and before training the texts of a prompt's tokens are compared with the model's.
"""

import asyncio
import os
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.data.batch import Batch, FloatArray
from corral.recipe.errors import RunError, UserError, install_command
from corral.recipe.schema import TeacherEndpoint
from corral.runtime.group import gather_calls

if TYPE_CHECKING:
    import httpx

FIRST_PAUSE_S = 0.5
"""Before the second attempt; it doubles with each further one."""
MAX_COMPARED, PER_REQUEST = 1024, 128
"""Tokens whose texts are compared with the teacher's, and how many of them are asked for at once."""


class EndpointTeacher:
    """Asks `POST {url}/completions` with `prompt_logprobs: 0`, many trajectories at once."""

    def __init__(self, settings: TeacherEndpoint) -> None:
        try:
            import httpx
        except ImportError as error:
            raise UserError(f"reference.endpoint needs an extra: {install_command('judge')}") from error
        variable = settings.api_key_variable
        if variable is not None and not os.environ.get(variable):
            raise UserError(f"reference.endpoint.api_key_variable: the environment variable {variable} is not set")
        self.settings = settings
        self.client: httpx.AsyncClient = httpx.AsyncClient(
            base_url=f"{settings.url.rstrip('/')}/",
            headers={} if variable is None else {"Authorization": f"Bearer {os.environ[variable]}"},
            timeout=settings.timeout_s,
            limits=httpx.Limits(max_connections=settings.concurrency),
            verify=ssl.create_default_context(),
        )

    async def check(self, tokens: Sequence[int], tokenizer: Any) -> None:
        """Raises where the endpoint gives no log-probs of a prompt, or has other tokens than `tokenizer`: those of a
        prompt, `tokens`, and some of all of them are compared."""
        some = sorted(tokenizer.get_vocab().values())[:: 1 + len(tokenizer) // MAX_COMPARED]
        compared = [*dict.fromkeys([token for token in tokens if token >= 0] + some)]
        for start in range(0, len(compared), PER_REQUEST):
            part = [compared[0], *compared[start : start + PER_REQUEST]]  # nothing is known of the first
            for token, place in zip(part[1:], await self._ask(part), strict=True):
                ours, theirs = tokenizer.decode([token]), place.get("decoded_token")
                if not isinstance(theirs, str):
                    raise UserError(
                        f"reference.endpoint: {self.settings.url} does not say the texts of tokens (`decoded_token`), "
                        "so nobody knows whether the teacher has the model's"
                    )
                # Some tokens are a part of a character, which servers write in different ways.
                if "\ufffd" not in ours + theirs and ours.strip() != theirs.strip():
                    raise UserError(
                        f"reference.endpoint: the teacher has other tokens than the model: number {token} is {ours!r} "
                        f"here and {theirs!r} there"
                    )

    async def compute_column(self, batch: Batch) -> FloatArray:
        """Returns a log-prob for each generated token, and 0 for the others."""
        column = np.zeros(len(batch.tokens), np.float32)
        turns = asyncio.Semaphore(self.settings.concurrency)

        async def compute(row: int) -> None:
            start, end = batch.offsets[row], batch.offsets[row + 1]
            generated = np.flatnonzero(batch.generated[start:end])
            if not len(generated):
                return
            tokens = batch.tokens[start : start + generated[-1] + 1].tolist()
            if min(tokens) < 0:
                raise RunError("reference.endpoint: this trajectory has an image, which the teacher would not see")
            async with turns:
                logprobs = [place["logprob"] for place in await self._ask(tokens)]
            column[start + generated] = np.array([0.0, *logprobs], np.float32)[generated]

        await gather_calls(*map(compute, range(len(batch))))
        return column

    async def _ask(self, tokens: list[int]) -> list[dict[str, Any]]:
        """Returns what the endpoint says of each token behind the first, after as many attempts as it takes."""
        import httpx

        body = {"model": self.settings.model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        for attempt in range(self.settings.retries + 1):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                reply = await self.client.post("completions", json=body)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__} {error}".rstrip()
                continue
            if reply.status_code == 200:
                return self._read(tokens, reply)
            problem = f"it answered {reply.status_code}: {reply.text[:300]}"
            if reply.status_code < 500 and reply.status_code not in (408, 429):
                break
        raise RunError(
            f"reference.endpoint: {self.settings.url} gave no log-probs of {len(tokens)} tokens in {attempt + 1} "
            f"attempt(s): {problem}"
        )

    def _read(self, tokens: list[int], reply: "httpx.Response") -> list[dict[str, Any]]:
        try:
            places = reply.json()["choices"][0]["prompt_logprobs"][1:]
            found = [place[str(token)] for token, place in zip(tokens[1:], places, strict=True)]
            if all(np.isfinite(place["logprob"]) for place in found):
                return found
        except (ValueError, LookupError, TypeError):
            pass
        raise RunError(
            f"reference.endpoint: {self.settings.url} did not answer with a finite log-prob for each token of the "
            f"prompt (`prompt_logprobs`, as vLLM and `corral serve` have it): {reply.text[:300]}"
        )

    async def close(self) -> None:
        await self.client.aclose()
