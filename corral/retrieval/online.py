"""Search by somebody else's HTTP API that answers in JSON, in the same shape as an index.

What differs from one service to the next is in a small file:

    url: https://api.example.com/search?q={query}&count={topk}
    key_env: EXAMPLE_API_KEY            # the name of the variable that has the key; {key} in url, headers and body
    headers: {Authorization: "Bearer {key}"}
    results: web.results                # where the list is in the answer
    title: title                        # fields of one result
    text: snippet
    id: url

With `body` it is a POST of JSON. A result has no score; its rank stands in for it: 1, 1/2, 1/3 and so on.
"""

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from corral.recipe.errors import RunError, UserError
from corral.retrieval.searcher import Hit, Passage

MAX_ANSWER = 8 * 2**20
PLACEHOLDER = re.compile(r"\{(query|topk|key)\}")


class OnlineSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    key_env: str | None = None
    headers: dict[str, str] = {}
    body: dict[str, Any] | None = None
    results: str
    title: str = "title"
    text: str = "snippet"
    id: str | None = None
    timeout_s: float = Field(10.0, gt=0)
    concurrency: int = Field(8, ge=1)

    @field_validator("url")
    @classmethod
    def is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return url


def read_online(path: Path) -> OnlineSettings:
    try:
        return OnlineSettings.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise UserError(f"{path}: {'; '.join(problems)}") from error


class OnlineSearcher:
    kind, merges, about = "online", False, ""
    num_passages: int | None = None

    def __init__(self, settings: OnlineSettings, key: str | None) -> None:
        if settings.key_env is not None and not key:
            raise UserError(f"the variable {settings.key_env}, which has the key of the search service, is not set")
        self.settings, self.key = settings, key or ""
        self.num_threads = settings.concurrency
        self.has_found = False
        """Whether an answer has had a list of results where it should be."""
        self.opener = urllib.request.build_opener(NoRedirects())

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [
            [self._hit(result, rank) for rank, result in enumerate(self._results(self._ask(query, k))[:k], 1)]
            for query in queries
        ]

    def _hit(self, result: Any, rank: int) -> Hit:
        title, text = (str(field_at(result, name) or "") for name in (self.settings.title, self.settings.text))
        name = None if self.settings.id is None else field_at(result, self.settings.id)
        return Hit(Passage(str(name or rank), f'"{title}"\n{text}'), 1 / rank)

    def _results(self, answer: Any) -> list[Any]:
        """Some services leave the list out when they have found nothing: once it was seen, that is believed."""
        for part in self.settings.results.split("."):
            answer = answer.get(part) if isinstance(answer, dict) else None
            if answer is None:
                if self.has_found:
                    return []
                raise RunError(f"online search: the answer has no `{part}` (`results: {self.settings.results}`)")
        if not isinstance(answer, list):
            raise RunError(f"online search: `{self.settings.results}` of the answer is not a list")
        self.has_found = True
        return answer

    def _ask(self, query: str, k: int) -> Any:
        settings, plain = self.settings, {"query": query, "topk": str(k), "key": self.key}
        quoted = {**plain, "query": urllib.parse.quote(query, safe=""), "key": urllib.parse.quote(self.key)}
        headers = {"Accept": "application/json", **fill_value(settings.headers, plain)}
        data = None
        if settings.body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(fill_value(settings.body, {**plain, "topk": k})).encode()
        request = urllib.request.Request(fill_value(settings.url, quoted), data, headers)
        try:
            with self.opener.open(request, timeout=settings.timeout_s) as answer:
                return json.loads(answer.read(MAX_ANSWER))
        except urllib.error.HTTPError as error:  # never its text or its address: the key may be in there
            raise RunError(f"online search: the service answered with {error.code}") from None
        except (OSError, ValueError) as error:
            what = type(error).__name__ if isinstance(error, ValueError) else getattr(error, "reason", error)
            raise RunError(f"online search: no answer ({what})") from None


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key is for the service that was named, not for where that points to."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def fill_value(value: Any, values: Mapping[str, str | int]) -> Any:
    """Replaces placeholders in texts, lists and mappings, in one pass: braces in a query stay what they are. A text
    that is nothing but {topk} becomes what that is: a number in a body."""
    if isinstance(value, dict):
        return {name: fill_value(item, values) for name, item in value.items()}
    if isinstance(value, list):
        return [fill_value(item, values) for item in value]
    if value == "{topk}":
        return values["topk"]
    return PLACEHOLDER.sub(lambda match: str(values[match[1]]), value) if isinstance(value, str) else value


def field_at(result: Any, path: str) -> Any:
    for part in path.split("."):
        result = result.get(part) if isinstance(result, dict) else None
    return result
