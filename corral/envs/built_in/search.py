"""Questions that are answered with the help of a search engine, in the manner of Search-R1.

The model thinks in `<think>`, asks with `<search>`, reads what is found in `<information>`, and ends with `<answer>`:
one long turn of its own, into which the environment writes. After `rollout.max_turns` replies comes one last one, in
which only an answer counts. The recipe's reward function scores everything behind the prompt.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from corral.data.rows import Message, Row
from corral.envs.base import Env, StepResult, final_step
from corral.recipe.errors import UserError
from corral.retrieval.client import RetrievalClient, RetrievedDocument
from corral.rewards.question_answering import ANSWER, TAG, is_in
from corral.rewards.scorer_pool import RewardScorer

ACTION = re.compile(r"<(?P<tag>search|answer)>(?P<text>.*?)</(?P=tag)>", re.DOTALL)

SEARCH_PROMPT = """\
Answer the question below. You can use a search engine as often as you need it.
First think, between <think> and </think>. Think again whenever you have read something new.
If you lack knowledge, search: write <search>what to look for</search>. What was found is then shown to you between \
<information> and </information>.
When you know the answer, write it as briefly as you can, without explanation, such as <answer>Nairobi</answer>.
Question: {question}
"""
ANSWER_PROMPT = """\
Answer the question below. First think, between <think> and </think>.
Then write the answer as briefly as you can, without explanation, such as <answer>Nairobi</answer>.
Question: {question}
"""
OBSERVATION = "\n\n<information>{documents}</information>\n\n"
DOCUMENT = "Doc {number} (Title: {title}) {text}"
NOTHING_FOUND = "Nothing was found."
QUESTION_MARKS = ("?", "？", "؟")
INVALID_FEEDBACK = """

That was neither a search nor an answer. To search, I write what I look for between <search> and </search>. To answer, \
I put the answer between the tags named answer. I try again.

"""


class SearchEnv(Env):
    bounds_itself = True
    """The retrieval client's patience and the reward's deadline bound every call."""
    inline = True

    def __init__(
        self,
        pool: RewardScorer,
        max_turns: int,
        shared: RetrievalClient | None = None,
        do_search: bool = True,
        prompt: str | None = SEARCH_PROMPT,
        observation: str = OBSERVATION,
        document: str = DOCUMENT,
        invalid_feedback: str = INVALID_FEEDBACK,
    ) -> None:
        self.last_turns = 1 if do_search else 0
        self._client = shared
        self._pool, self._max_turns, self._do_search = pool, max_turns, do_search
        self._prompt = ANSWER_PROMPT if prompt == SEARCH_PROMPT and not do_search else prompt
        self._before, _, self._closing = observation.partition("{documents}")
        self._document, self._invalid_feedback = document, invalid_feedback
        check_text("prompt", self._prompt, "{question}")
        check_text("observation", observation, "{documents}")
        check_text("document", document, "{text}")
        if ANSWER.search(invalid_feedback):
            raise UserError(
                "environment `search`: its option `invalid_feedback` has an <answer>...</answer> in it, "
                "which would be scored as the model's"
            )
        self._row: Row | None = None
        self._transcript = self._unread = ""
        self._unread_is_information = False
        self._turns = self._valid = self._searches = 0
        self._search_s = 0.0
        self._answered = self._found = False

    @classmethod
    def open_shared(
        cls,
        do_search: bool = True,
        retriever: str | Sequence[str] = (),
        topk: int = 3,
        patience_s: float = 300.0,
        request_timeout_s: float = 30.0,
        cache_size: int = 10_000,
        token_file: str | None = None,
    ) -> RetrievalClient | None:
        if not do_search:
            return None
        if not retriever:
            raise UserError(
                "environment `search` needs the option `retriever`, an address such as http://127.0.0.1:8000 "
                "(`corral retriever serve` starts one); or `do_search: false`"
            )
        return RetrievalClient(
            retriever,
            topk=topk,
            timeout_s=request_timeout_s,
            patience_s=patience_s,
            cache_size=cache_size,
            token_file=token_file,
        )

    async def reset(self, row: Row, seed: int) -> list[Message]:
        self._row = row
        return row.prompt if self._prompt is None else with_question(row.prompt, self._prompt)

    async def step(self, reply: str) -> StepResult:
        assert self._row is not None, "step before reset"
        self._read(self._row)
        action = read_action(reply)
        self._transcript += action.transcript
        self._turns += 1
        may_search = self._do_search and self._turns <= self._max_turns
        self._answered = action.tag == "answer"
        self._valid += self._answered or (may_search and action.tag == "search")
        if self._answered or not may_search:
            return final_step(await self._pool.score(self._transcript, self._row))
        if action.tag == "search":
            self._unread = self._before + await self._search(action.text) + self._closing
        else:
            self._unread = self._invalid_feedback
        self._unread_is_information = action.tag == "search"
        message = Message(role="user", content=self._unread)
        return StepResult([message], 0.0, done=False, closing=self._closing if self._unread_is_information else "")

    def was_shown(self, messages: list[Message]) -> None:
        """What was cut off is neither scored nor found."""
        self._unread = "".join(message["content"] for message in messages)

    async def close(self) -> None:
        self._row = None

    def summary(self) -> dict[str, float]:
        return {
            "turns": float(self._turns),
            "searches": float(self._searches),
            "search_s": self._search_s,
            "valid_actions": self._valid / max(self._turns, 1),
            "found": float(self._found),
            "answered": float(self._answered),
        }

    def _read(self, row: Row) -> None:
        """The model has seen the last observation, for it replies. One that came too late for a reply it has not."""
        self._transcript += self._unread
        if self._unread_is_information and not self._found and row.answer is not None:
            text = self._unread.removeprefix(self._before).removesuffix(self._closing)
            self._found = is_in(text, row.answer)
        self._unread, self._unread_is_information = "", False

    async def _search(self, query: str) -> str:
        assert self._client is not None, "without `do_search` nothing is searched"
        self._searches += 1
        started = time.monotonic()
        try:
            documents = await self._client.search(query)
        finally:
            self._search_s += time.monotonic() - started
        shown = [show(document, number, self._document) for number, document in enumerate(documents, start=1)]
        return "\n".join(shown) or NOTHING_FOUND


@dataclass(frozen=True)
class SearchAction:
    tag: str | None
    """search, answer, or None for a reply that is neither."""
    text: str
    transcript: str
    """The reply up to the end of the action. What the model goes on to write then, having no stop strings, is in its
    context, but it counts for nothing: documents that it makes up, or an answer to them."""


def read_action(reply: str) -> SearchAction:
    """The first complete tag decides. A search for nothing is none."""
    match = ACTION.search(reply)
    if match is None:
        return SearchAction(None, "", reply)
    text, transcript = match["text"].strip(), reply[: match.end()]
    if match["tag"] == "search" and not text:
        return SearchAction(None, "", transcript)
    return SearchAction(match["tag"], text, transcript)


def show(document: RetrievedDocument, number: int, template: str) -> str:
    """Tags in documents get square brackets, so that nothing that was found is taken for the model's own doing."""
    values = {"{number}": str(number), "{title}": document.title, "{text}": document.text}
    filled = re.sub(r"\{(?:number|title|text)\}", lambda match: values[match[0]], template)
    return TAG.sub(lambda match: f"[{match[0][1:-1]}]", filled)  # without brackets, those around it might do


def with_question(prompt: Sequence[Message], template: str) -> list[Message]:
    """The template with the last user message in it, instead of that message. It ends as a question does, since many
    of those in data sets do not (Search-R1 does so)."""
    position = max(index for index, message in enumerate(prompt) if message["role"] == "user")
    question = prompt[position]["content"].strip()
    if not question.endswith(QUESTION_MARKS):
        question += "?"
    message = Message(role="user", content=template.replace("{question}", question))
    return [*prompt[:position], message, *prompt[position + 1 :]]


def check_text(option: str, text: str | None, place: str) -> None:
    if text is not None and place not in text:
        raise UserError(f"environment `search`: its option `{option}` must contain `{place}`")
