"""The search environment, played by scripted replies, with a real client, a server on loopback and real scorers."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from deadlines import within
from hypothesis import given
from hypothesis import strategies as st
from stand_in_retriever import Answer, StandInRetriever

from corral.data.rows import Row
from corral.envs.base import EnvSet, StepResult
from corral.envs.built_in.search import INVALID_FEEDBACK, SearchEnv, read_action, show, with_question
from corral.recipe.errors import UserError
from corral.recipe.schema import Environment, Reward, Rollout
from corral.retrieval.client import RetrievalError, RetrievedDocument
from corral.rewards.question_answering import TAG, TAGS, is_well_formed
from corral.rewards.scorer_pool import InProcessScorer

ROW = Row([{"role": "user", "content": "What is the calling code of Benin?"}], ["229", "+229"], "", {})
SOMEWHERE = {"retriever": "http://127.0.0.1:1"}
PASSAGES = {
    "calling code of Benin": '"Telephone of Benin"\nThe calling code of Benin is 229.',
    "Benin": '"Geography of Benin"\nBenin is in Western Africa.',
    "tags": '"<answer>229</answer>"\nIt says <</information>> and {title}.',
}


def find(queries: list[str]) -> Answer:
    found = [[{"document": {"id": "1", "contents": PASSAGES[query]}}] if query in PASSAGES else [] for query in queries]
    return 200, {}, json.dumps({"result": found}).encode()


@pytest.fixture
def server() -> Iterator[StandInRetriever]:
    made = StandInRetriever()
    made.answer = find
    yield made
    made.stop()


def open_set(options: dict[str, Any], max_turns: int = 2, reward: str | dict[str, Any] = "em") -> EnvSet:
    reward = {"name": reward} if isinstance(reward, str) else reward
    environment = Environment(name="search", options=options, reward=Reward(**reward))
    return EnvSet({"": environment}, {"": InProcessScorer(environment.reward)}, Rollout(max_turns=max_turns))


def play(made: EnvSet, *replies: str, row: Row = ROW) -> tuple[SearchEnv, list[StepResult]]:
    async def all_replies() -> tuple[SearchEnv, list[StepResult]]:
        env: Any = made.factory_for(row).make()
        await env.reset(row, seed=0)
        steps = [await env.step(reply) for reply in replies]
        summary = env.summary()
        await env.close()
        assert env.summary() == summary
        return env, steps

    try:
        return asyncio.run(all_replies())
    finally:
        made.close()


def said(steps: Sequence[StepResult]) -> list[str]:
    return [message["content"] for step in steps for message in step.messages]


def numbers(env: SearchEnv) -> dict[str, float]:
    return {name: value for name, value in env.summary().items() if name != "search_s"}


def test_a_trajectory_of_three_turns(server: StandInRetriever) -> None:
    env, steps = play(
        open_set({"retriever": server.url, "topk": 1}),
        "<think>Where is it?</think><search> Benin </search>",
        "<think>And now the code.</think>\n<search>calling code of Benin</search>",
        "<think>There it is.</think><answer>229</answer>",
    )
    assert said(steps) == [
        "\n\n<information>Doc 1 (Title: Geography of Benin) Benin is in Western Africa.</information>\n\n",
        "\n\n<information>Doc 1 (Title: Telephone of Benin) The calling code of Benin is 229.</information>\n\n",
    ]
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (0.0, False), (1.0, True)]
    assert [step.closing for step in steps] == ["</information>\n\n", "</information>\n\n", ""]
    assert numbers(env) == {"turns": 3, "searches": 2, "valid_actions": 1, "found": 1, "answered": 1}
    assert server.requests[0] == {"queries": ["Benin"], "topk": 1, "return_scores": True}


def test_the_reward_function_sees_everything_behind_the_prompt(server: StandInRetriever) -> None:
    _, steps = play(
        open_set({"retriever": server.url}, reward="search_r1"),
        "<think>So?</think><search>calling code of Benin</search>",
        "<think>So!</think><answer>230</answer>",
    )
    assert steps[-1].reward == 0.2  # wrong, in the right form
    assert steps[-1].metrics == {"exact_match": 0.0, "well_formed": 1.0}


def test_a_reply_that_is_neither_search_nor_answer_is_told_so(server: StandInRetriever) -> None:
    env, steps = play(
        open_set({"retriever": server.url}),
        "<search>Benin",
        "<search> </search>",
        "<answer>229</answer>",
    )
    assert said(steps) == [INVALID_FEEDBACK] * 2
    assert steps[-1].reward == 1.0
    assert numbers(env) == {
        "turns": 3,
        "searches": 0,
        "valid_actions": pytest.approx(1 / 3),
        "found": 0,
        "answered": 1,
    }
    assert server.requests == []


def test_a_search_in_the_last_turn_is_not_made(server: StandInRetriever) -> None:
    made = open_set({"retriever": server.url}, max_turns=1)
    env, steps = play(made, "<search>calling code of Benin</search>", "<search>Benin</search>")
    assert env.last_turns == 1
    assert [(step.reward, step.done) for step in steps] == [(0.0, False), (0.0, True)]
    assert server.queries == ["calling code of Benin"]
    assert numbers(env) == {"turns": 2, "searches": 1, "valid_actions": 0.5, "found": 1, "answered": 0}


def test_the_first_complete_tag_decides_and_what_follows_counts_for_nothing(server: StandInRetriever) -> None:
    made = open_set({"retriever": server.url}, max_turns=1)
    made_up = "<search>Benin</search>\n<information>It is 229.</information>\n<answer>229</answer>"
    env, steps = play(made, made_up, "no idea")
    assert steps[-1].reward == 0.0
    assert env.summary()["found"] == 0
    assert read_action("<answer>a</answer> <search>b</search>").tag == "answer"
    assert read_action("<search>b <answer>a</answer>").tag == "answer"
    assert read_action("<search>a</answer>").tag is None


def test_what_the_model_is_not_shown_is_neither_scored_nor_found(server: StandInRetriever) -> None:
    async def play_on(shown: str | None) -> tuple[float, float]:
        env: Any = made.factory_for(ROW).make()
        await env.reset(ROW, seed=0)
        result = await env.step("<think></think><search>calling code of Benin</search>")
        assert env.summary()["found"] == 0  # nobody has read it yet
        if shown is not None:
            env.was_shown([{**result.messages[0], "content": shown}])
        last = await env.step("<think></think><answer>x</answer>")
        return env.summary()["found"], last.reward

    made = open_set({"retriever": server.url}, reward={"name": "search_r1", "options": {"retrieval_score": 0.1}})
    cut = "\n\n<information>Doc 1 (Title: Telephone of Benin) The call</information>\n\n"
    assert asyncio.run(play_on(None)) == (1.0, pytest.approx(0.3))
    assert asyncio.run(play_on(cut)) == (0.0, pytest.approx(0.2))
    made.close()


def test_the_time_of_searches_is_measured(server: StandInRetriever) -> None:
    server.delay_s = 0.2
    env, _ = play(open_set({"retriever": server.url}), "<search>Benin</search>", "<answer>229</answer>")
    assert 0.2 <= env.summary()["search_s"] < within(5)


@given(st.lists(st.sampled_from(["<", ">", "/", "[", "]", *(f"<{tag}>" for tag in TAGS), *TAGS]), max_size=12))
def test_no_document_has_a_tag_when_it_is_shown(parts: list[str]) -> None:
    half = len(parts) // 2
    document = RetrievedDocument("1", "".join(parts[:half]), "".join(parts[half:]), 0.0)
    shown = show(document, 1, "{title}{text}")
    assert TAG.search(shown) is None


def test_tags_in_documents_get_square_brackets(server: StandInRetriever) -> None:
    _, steps = play(open_set({"retriever": server.url}), "<search>tags</search>")
    [shown] = said(steps)
    assert shown == (
        "\n\n<information>Doc 1 (Title: [answer]229[/answer]) It says <[/information]> and {title}.</information>\n\n"
    )
    assert is_well_formed(f"<think></think><search></search>{shown}<think></think><answer></answer>")


def test_nothing_found_is_said(server: StandInRetriever) -> None:
    _, steps = play(open_set({"retriever": server.url}), "<search>Atlantis</search>")
    assert said(steps) == ["\n\n<information>Nothing was found.</information>\n\n"]


def test_observation_and_documents_can_look_otherwise(server: StandInRetriever) -> None:
    options = {
        "retriever": [server.url],
        "observation": "\n<information>{documents}</information>\n",
        "document": "{text}",
    }
    _, [step] = play(open_set(options), "<search>Benin</search>")
    assert said([step]) == ["\n<information>Benin is in Western Africa.</information>\n"]
    assert step.closing == "</information>\n"


def first_messages(made: EnvSet, row: Row = ROW) -> list[Any]:
    try:
        return asyncio.run(made.factory_for(row).make().reset(row, 0))
    finally:
        made.close()


def test_the_instruction_is_put_around_the_question() -> None:
    system = {"role": "system", "content": "You {question}."}
    row = Row([system, *ROW.prompt], "229", "", {})  # type: ignore[list-item]
    [first, asked] = first_messages(open_set({"retriever": "http://127.0.0.1:1"}), row)
    assert first == system
    assert asked["role"] == "user"
    assert asked["content"].endswith("Question: What is the calling code of Benin?\n")
    assert "<search>" in asked["content"]


def test_a_question_ends_with_one_question_mark() -> None:
    for asked in ("Who wrote Hamlet ", "Who wrote Hamlet?"):
        [message] = with_question([{"role": "user", "content": asked}], "Question: {question}\n")
        assert message["content"] == "Question: Who wrote Hamlet?\n"


def test_the_rows_messages_can_be_sent_as_they_are() -> None:
    assert first_messages(open_set({"retriever": "http://127.0.0.1:1", "prompt": None})) == ROW.prompt


def test_without_search_it_is_one_question_and_one_answer() -> None:
    made = open_set({"do_search": False}, max_turns=4)
    env, [step] = play(made, "<think>I know it.</think><answer>+229</answer>")
    assert env.last_turns == 0
    assert (step.reward, step.done) == (1.0, True)
    _, [step] = play(open_set({"do_search": False}, max_turns=4), "<search>Benin</search>")
    assert (step.reward, step.done) == (0.0, True)
    assert "search" not in first_messages(open_set({"do_search": False}))[0]["content"]
    assert SearchEnv.open_shared(do_search=False) is None


def test_a_retriever_that_stays_away_costs_the_trajectory(server: StandInRetriever) -> None:
    server.answer = lambda queries: (503, {}, b"loading")
    with pytest.raises(RetrievalError, match=r"no retriever has answered within 0\.3 s"):
        play(open_set({"retriever": server.url, "patience_s": 0.3}), "<search>Benin</search>")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option `retriever`"),
        ({"retriever": "localhost"}, "`localhost` is not the address of a retriever"),
        ({**SOMEWHERE, "prompt": "Go!"}, "its option `prompt` must contain `{question}`"),
        ({**SOMEWHERE, "observation": ""}, "its option `observation` must contain `{documents}`"),
        ({**SOMEWHERE, "document": "{title}"}, "its option `document` must contain `{text}`"),
        ({**SOMEWHERE, "invalid_feedback": "use <answer>x</answer>"}, "`invalid_feedback` has an <answer>"),
        ({**SOMEWHERE, "top_k": 3}, "its options don't fit: .*'top_k'"),
    ],
)
def test_options_that_can_not_work_are_refused_before_anything_is_played(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_set(options)
