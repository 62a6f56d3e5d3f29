"""The formats of `corral serve`: requests and answers of the OpenAI API and of vLLM's token-in route.

A body that asks for something which would change the answer, and which the engine does not do, is refused by name.
Answers are written whole, or piece by piece for a stream.
"""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from corral.data.rows import Message
from corral.envs.chat_endpoint import ChatReply, ChatRequest, as_sent, assistant_message, usage
from corral.http_server import RequestRefused, format_validation_error
from corral.recipe.schema import MAX_TOP_K
from corral.rollout.engine import Completion, FinishReason, Sampling

MAX_SAMPLES = 128

# --- what is asked for


class RequestBody(BaseModel):
    """JSON's null stands for an optional field that is not given, as the OpenAI API has it."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        return {k: v for k, v in fields.items() if v is not None} if isinstance(fields, dict) else fields


class SamplingFields(RequestBody):
    """How to sample, in the words of OpenAI and vLLM. What is not listed here and would change the answer is refused;
    what would not (`user`, `metadata`, ...) is ignored."""

    model_config = ConfigDict(extra="allow")

    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_TOP_K)
    min_p: float = Field(0.0, ge=0, le=1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    n: int = Field(1, ge=1, le=MAX_SAMPLES)

    @property
    def stop_strings(self) -> list[str]:
        """The texts before which an answer ends. An empty one is in every text, and asks for nothing."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stop if text]

    def sampling(self, max_tokens: int, end_tokens: frozenset[int]) -> Sampling:
        own = frozenset() if self.ignore_eos else end_tokens
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            stop=tuple(self.stop_strings),
            stop_tokens=own | frozenset(self.stop_token_ids or ()),
        )


class StreamOptions(RequestBody):
    include_usage: bool = False


class ApiBody(SamplingFields):
    """What the routes of the OpenAI API have in common."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: Literal[True] = True
    """vLLM's: texts are without special tokens."""


class ChatBody(ApiBody):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: bool = False
    add_special_tokens: Literal[False] = False
    """vLLM's: the chat template writes the special tokens, and the tokenizer adds none."""


Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[int], Field(min_length=1)]


class TextBody(ApiBody):
    prompt: Text | Tokens | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Tokens], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=1)
    prompt_logprobs: Literal[0] | None = None
    """vLLM's: 0 asks for the log-prob of each of the prompt's tokens, and of no others in their place."""
    add_special_tokens: Literal[True] = True
    """vLLM's: a text gets the special tokens with which the tokenizer begins every text."""

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    @model_validator(mode="after")
    def _bounded(self) -> "TextBody":
        if len(self.prompts) * self.n > MAX_SAMPLES:
            raise ValueError(f"{len(self.prompts)} prompts with n = {self.n} are more than {MAX_SAMPLES} completions")
        return self


class TokensBody(RequestBody):
    """vLLM's token-in request."""

    model_config = ConfigDict(extra="allow")

    token_ids: list[int] = Field(min_length=1)
    sampling_params: "TokensSampling"
    request_id: str = ""
    model: str | None = None
    stream: Literal[False] = False


class TokensSampling(SamplingFields):
    logprobs: int | None = Field(None, ge=0, le=1)


REFUSED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_choice": (),
    "guided_regex": (),
    "guided_grammar": (),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "features": ({},),
}
"""Fields that this server does not know, and values of them that ask for nothing."""


def parse(kind: type[BaseModel], content: bytes) -> Any:
    try:
        body = kind.model_validate_json(content)
    except ValidationError as error:
        raise RequestRefused(400, "invalid", format_validation_error(error)) from error
    for fields in (body, body.sampling_params) if isinstance(body, TokensBody) else (body,):
        for name, value in (fields.model_extra or {}).items():
            if name in REFUSED and value not in REFUSED[name]:
                raise RequestRefused(400, "unsupported", f"`{name}: {json.dumps(value)[:60]}` is not supported")
    return body


# --- answers


def end_before_stop(text: str, stop: Sequence[str]) -> int:
    """Where a text ends that does not include the first of the stop strings."""
    found = [place for one in stop if (place := text.find(one)) >= 0]
    return min(found, default=len(text))


def text_of(tokenizer: Any, completion: Completion, stop: Sequence[str]) -> str:
    text: str = tokenizer.decode(completion.tokens, skip_special_tokens=True)
    return text[: end_before_stop(text, stop)]


class TextStream:
    """Turns tokens into pieces of text, each of which is final: characters of several tokens are held back, and what
    may be the beginning of a stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.tokens: list[int] = []
        self.text = ""
        self.num_sent = 0
        self.start = self.read = 0
        """A token's text may depend on those before it: what is decoded begins at `start`, and is known up to
        `read`."""

    def add(self, tokens: Sequence[int], is_last: bool) -> str:
        self.tokens += tokens
        before = self._decode(self.tokens[self.start : self.read])
        now = self._decode(self.tokens[self.start :])
        if is_last or not now.endswith("\ufffd"):
            self.text += now[len(before) :]
            self.start, self.read = self.read, len(self.tokens)
        end = end_before_stop(self.text, self.stop)
        if end == len(self.text) and not is_last:
            end -= max((len(one) - 1 for one in self.stop), default=0)
        piece = self.text[self.num_sent : max(end, self.num_sent)]
        self.num_sent += len(piece)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def finish_name(reason: FinishReason) -> str:
    return "length" if reason is FinishReason.LENGTH else "stop"


class Writer:
    """Formats the completions of one request, whole or piece by piece."""

    def __init__(self, name: str, body: ApiBody, tokenizer: Any, prompts: Sequence[list[int]], kind: str) -> None:
        self.body, self.tokenizer, self.prompts = body, tokenizer, prompts
        self.stop, self.id = body.stop_strings, secrets.token_hex(8)
        self.head = {"id": f"{kind}-{self.id}", "created": int(time.time()), "model": body.model or name}
        self.streams = [TextStream(tokenizer, self.stop) for _ in range(body.n * len(prompts))]

    def usage(self, completions: Sequence[Completion]) -> dict[str, int]:
        num_new = sum(len(completion.tokens) for completion in completions)
        num_prompt = sum(map(len, self.prompts))
        return usage(ChatReply(Message(role="assistant", content=""), "", num_prompt, num_new))

    def with_usage(self, completions: Sequence[Completion], event: dict[str, Any]) -> list[dict[str, Any]]:
        if self.body.stream_options is None or not self.body.stream_options.include_usage:
            return []
        return [{**event, "choices": [], "usage": self.usage(completions)}]


class ChatWriter(Writer):
    def __init__(
        self, name: str, body: ChatBody, asked: ChatRequest, tokenizer: Any, prompts: Sequence[list[int]]
    ) -> None:
        super().__init__(name, body, tokenizer, prompts, "chatcmpl")
        self.asked, self.wants_logprobs = asked, body.logprobs
        self.chunk = {**self.head, "object": "chat.completion.chunk"}

    def message(self, index: int, completion: Completion) -> tuple[dict[str, Any], str]:
        """(the message, why it ended)"""
        text = text_of(self.tokenizer, completion, self.stop)
        message = as_sent(assistant_message(text, self.asked, "hermes", f"{self.id}_{index}"))
        return message, "tool_calls" if "tool_calls" in message else finish_name(completion.finish_reason)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = []
        for index, completion in enumerate(completions):
            message, reason = self.message(index, completion)
            choices.append(
                {"index": index, "message": message, "logprobs": self.logprobs(completion), "finish_reason": reason}
            )
        return {**self.head, "object": "chat.completion", "choices": choices, "usage": self.usage(completions)}

    def logprobs(self, completion: Completion) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        texts = [self.tokenizer.decode([token]) for token in completion.tokens]
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, completion.logprobs, strict=True)
            ]
        }

    def piece(self, index: int, new: list[int]) -> list[dict[str, Any]]:
        if self.asked.parse_calls or self.wants_logprobs:  # only the whole reply can be read for calls
            return []
        text = self.streams[index].add(new, is_last=False)
        return [self.delta(index, {"role": "assistant", "content": text})] if text else []

    def delta(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**self.chunk, "choices": [{"index": index, "delta": delta, "finish_reason": reason}]}

    def end(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        events = []
        for index, completion in enumerate(completions):
            message, reason = self.message(index, completion)
            if self.asked.parse_calls or self.wants_logprobs:
                if "tool_calls" in message:
                    message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
                event = self.delta(index, message)
                event["choices"][0]["logprobs"] = self.logprobs(completion)
                events.append(event)
            elif rest := self.streams[index].add([], is_last=True):
                events.append(self.delta(index, {"content": rest}))
            events.append(self.delta(index, {}, reason))
        return [*events, *self.with_usage(completions, self.chunk)]


class TextWriter(Writer):
    def __init__(self, name: str, body: TextBody, tokenizer: Any, prompts: Sequence[list[int]]) -> None:
        super().__init__(name, body, tokenizer, prompts, "cmpl")
        self.wants_logprobs = body.logprobs is not None
        self.prompt_logprobs: list[list[dict[str, Any] | None]] = []
        """Of each prompt, where they are asked for."""
        self.head["object"] = "text_completion"

    def add_prompt_logprobs(self, logprobs: Sequence[Sequence[float]]) -> None:
        """`logprobs`: of all tokens of each prompt behind the first."""
        for tokens, own in zip(self.prompts, logprobs, strict=True):
            texts = (self.tokenizer.decode([token]) for token in tokens[1:])
            self.prompt_logprobs.append([None])
            self.prompt_logprobs[-1] += [
                {str(token): {"logprob": logprob, "decoded_token": text}}
                for token, logprob, text in zip(tokens[1:], own, texts, strict=True)
            ]

    def choice(self, index: int, text: str, reason: str | None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if not self.prompt_logprobs:
            return choice
        return {**choice, "prompt_logprobs": self.prompt_logprobs[index // self.body.n]}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [
            self.choice(i, text_of(self.tokenizer, one, self.stop), finish_name(one.finish_reason), self.logprobs(one))
            for i, one in enumerate(completions)
        ]
        return {**self.head, "choices": choices, "usage": self.usage(completions)}

    def logprobs(self, completion: Completion) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        texts = [self.tokenizer.decode([token]) for token in completion.tokens]
        return {"tokens": texts, "token_logprobs": completion.logprobs, "top_logprobs": None, "text_offset": []}

    def piece(self, index: int, new: list[int]) -> list[dict[str, Any]]:
        text = self.streams[index].add(new, is_last=False)
        return [{**self.head, "choices": [self.choice(index, text, None)]}] if text else []

    def end(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        events = [
            {
                **self.head,
                "choices": [
                    self.choice(
                        index,
                        self.streams[index].add([], is_last=True),
                        finish_name(completion.finish_reason),
                        self.logprobs(completion),
                    )
                ],
            }
            for index, completion in enumerate(completions)
        ]
        return [*events, *self.with_usage(completions, self.head)]
