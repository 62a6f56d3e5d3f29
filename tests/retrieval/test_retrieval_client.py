"""The client against a real server on loopback, which each test tells how to behave."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from deadlines import within
from stand_in_retriever import Answer, StandInRetriever, in_full

from corral.recipe.errors import UserError
from corral.retrieval import client as retrieval_client
from corral.retrieval.client import PendingQuery, RetrievalClient, RetrievalError, RetrievedDocument, RetrieverEndpoint


@pytest.fixture
def server() -> Iterator[StandInRetriever]:
    made = StandInRetriever()
    yield made
    made.stop()


@pytest.fixture
def client(server: StandInRetriever) -> Iterator[RetrievalClient]:
    made = RetrievalClient(server.url, patience_s=within(10), batch_wait_s=0.05)
    yield made
    made.close()


def search(client: RetrievalClient, *queries: str) -> list[list[RetrievedDocument]]:
    async def all_at_once() -> list[list[RetrievedDocument]]:
        return await asyncio.gather(*(client.search(query) for query in queries))

    return asyncio.run(all_at_once())


def test_queries_that_are_asked_together_are_one_request(server: StandInRetriever) -> None:
    client = RetrievalClient(server.url, batch_size=3, batch_wait_s=within(10))  # it does not wait for more than three
    found = search(client, "a", "b", "c")
    client.close()
    assert [documents[0].title for documents in found] == ["On a", "On b", "On c"]
    assert server.requests == [{"queries": ["a", "b", "c"], "topk": 3, "return_scores": True}]


def test_a_request_has_no_more_queries_than_it_may(server: StandInRetriever) -> None:
    client = RetrievalClient(server.url, batch_size=2, batch_wait_s=within(10))
    search(client, "a", "b", "c", "d", "e", "f")
    assert [len(request["queries"]) for request in server.requests] == [2, 2, 2]
    client.close()


def test_a_query_that_is_under_way_is_not_asked_again(server: StandInRetriever, client: RetrievalClient) -> None:
    server.delay_s = 0.2

    async def one_later() -> None:
        first = asyncio.ensure_future(client.search("a"))
        await asyncio.sleep(0.1)
        assert await client.search(" a ") == await first

    asyncio.run(one_later())
    assert server.queries == ["a"]


def test_giving_up_one_of_two_equal_queries_leaves_the_other(server: StandInRetriever, client: RetrievalClient) -> None:
    server.delay_s = 0.1

    async def give_up_one() -> list[RetrievedDocument]:
        given_up, kept = (asyncio.ensure_future(client.search("a")) for _ in range(2))
        await asyncio.sleep(0.03)
        given_up.cancel()
        return await kept

    assert len(asyncio.run(give_up_one())) == 1


def test_what_was_found_is_remembered_over_event_loops(server: StandInRetriever, client: RetrievalClient) -> None:
    assert search(client, "a") == search(client, "a")
    assert server.queries == ["a"]


def test_what_was_not_asked_for_longest_is_forgotten_first(server: StandInRetriever) -> None:
    client = RetrievalClient(server.url, cache_size=2)
    for query in ("a", "b", "a", "c", "a", "b"):
        search(client, query)
    assert server.queries == ["a", "b", "c", "b"]
    client.close()


@pytest.mark.parametrize(
    ("answered", "expected"),
    [
        (
            {"document": {"id": 3, "contents": '"T"\ntext\nmore'}, "score": 1},
            RetrievedDocument("3", "T", "text\nmore", 1.0),
        ),
        ({"id": "3", "contents": '"T"\ntext'}, RetrievedDocument("3", "T", "text", None)),
        ({"document": {"contents": '"T"\ntext'}}, RetrievedDocument("", "T", "text", None)),
        ({"document": '"T"\ntext', "score": 0.5}, RetrievedDocument("", "T", "text", 0.5)),
        ({"id": "3", "contents": "text"}, RetrievedDocument("3", "", "text", None)),
        ({"id": "3", "title": "T", "text": "text"}, RetrievedDocument("3", "T", "text", None)),
    ],
)
def test_documents_come_in_several_shapes(
    server: StandInRetriever, client: RetrievalClient, answered: dict[str, Any], expected: RetrievedDocument
) -> None:
    server.answer = lambda queries: (200, {}, json.dumps({"result": [[answered]] * len(queries)}).encode())
    assert search(client, "a") == [[expected]]


def test_servers_take_turns_and_one_that_is_away_is_left_alone(
    server: StandInRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval_client, "FIRST_PAUSE_S", retrieval_client.LONGEST_PAUSE_S)  # for slow machines
    other, away = StandInRetriever(), StandInRetriever()
    away.stop()
    client = RetrievalClient([server.url, away.url, other.url], patience_s=within(5))
    for number in range(8):
        search(client, f"{number}")
    assert sorted(server.queries + other.queries) == [f"{number}" for number in range(8)]
    assert min(len(server.queries), len(other.queries)) >= 3
    assert client.endpoints[1].failures == 1  # asked once, and not again so soon
    client.close()
    other.stop()


def test_queries_wait_for_a_server_that_is_started_again(server: StandInRetriever, client: RetrievalClient) -> None:
    search(client, "before")  # the connection is kept, and breaks
    server.stop()
    threading.Timer(0.7, server.start).start()
    [[document], _] = search(client, "a", "b")
    assert document.title == "On a"
    assert sorted(server.queries) == ["a", "b", "before"]


def test_a_server_that_dies_while_it_answers_is_asked_again(server: StandInRetriever, client: RetrievalClient) -> None:
    def die_once(queries: list[str]) -> Answer:
        server.answer = in_full
        return None

    server.answer = die_once
    assert len(search(client, "a")) == 1
    assert server.queries == ["a", "a"]


def test_a_busy_server_is_asked_again_when_it_says(server: StandInRetriever, client: RetrievalClient) -> None:
    def once_busy(queries: list[str]) -> Answer:
        server.answer = in_full
        return 503, {"Retry-After": "1"}, b'{"error": "loading"}'

    server.answer = once_busy
    started = time.monotonic()
    search(client, "a")
    assert 1.0 <= time.monotonic() - started < within(3)
    assert server.queries == ["a", "a"]


@pytest.mark.deadline("the server must answer within its 0.5 s")
def test_patience_ends_with_what_the_server_said(server: StandInRetriever) -> None:
    server.answer = lambda queries: (503, {}, b"loading")
    client = RetrievalClient(server.url, patience_s=0.5)
    with pytest.raises(
        RetrievalError, match=rf"no retriever has answered within 0\.5 s .*{server.port}/retrieve answered 503: loading"
    ):
        search(client, "a")
    client.close()


@pytest.mark.deadline("the client's thread must give up before its caller does")
def test_a_server_that_does_not_answer_in_time_has_failed(server: StandInRetriever) -> None:
    server.delay_s = within(1.0)
    client = RetrievalClient(server.url, timeout_s=within(0.2), patience_s=within(0.3))
    with pytest.raises(RetrievalError, match=f"/retrieve: no answer within {within(0.2):g} s"):
        search(client, "a")
    client.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {}, b"<html>"), r"/retrieve answered what is not a result \(Expecting value.*<html>"),
        ((200, {}, b'{"results": []}'), r"not a result \(no `result`\)"),
        ((200, {}, b'{"result": []}'), r"not a result \(0 results for 1 queries\)"),
        ((200, {}, b'{"result": [[5]]}'), r"not a result \(a document is neither an object nor a text\)"),
        ((200, {}, b'{"result": [[{"title": "T"}]]}'), r"not a result \(no 'text'\)"),
        ((404, {}, b"nothing here"), r"/retrieve answered 404: nothing here"),
        ((500, {}, b"oh"), r"/retrieve answered 500: oh"),
    ],
)
def test_an_answer_that_is_none_is_told_at_once(
    server: StandInRetriever, client: RetrievalClient, answer: Answer, message: str
) -> None:
    server.answer = lambda queries: answer
    with pytest.raises(RetrievalError, match=message):
        search(client, "a")
    assert server.queries == ["a"]


def test_a_query_that_the_server_refuses_does_not_cost_the_others(
    server: StandInRetriever, client: RetrievalClient
) -> None:
    server.answer = lambda queries: (422, {}, b"no") if "bad" in queries else in_full(queries)

    async def both() -> list[Any]:
        return await asyncio.gather(*map(client.search, ("good", "bad")), return_exceptions=True)

    good, bad = asyncio.run(both())
    assert good[0].title == "On good"
    assert isinstance(bad, RetrievalError)


def test_an_endless_query_is_cut(server: StandInRetriever, client: RetrievalClient) -> None:
    search(client, "a" * 5000)
    assert [len(query) for query in server.queries] == [2000]


def test_the_token_of_a_file_is_sent(server: StandInRetriever, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    client = RetrievalClient(f"{server.url}/retrieve", token_file=tmp_path / "token")
    search(client, "a")
    assert server.authorisations == ["Bearer secret"]
    client.close()


@pytest.mark.parametrize(
    ("endpoints", "options", "message"),
    [
        ([], {}, "no address of a retriever is given"),
        ("localhost:8000", {}, "`localhost:8000` is not the address of a retriever; one is `http"),
        ("http://127.0.0.1:99999", {}, "`http://127.0.0.1:99999` is not the address of a retriever: Port out of range"),
        ("http://[::1", {}, "is not the address of a retriever: Invalid IPv6"),
        ("http://127.0.0.1:1", {"token_file": "no/such/file"}, "the retriever's token can't be read: no/such/file"),
    ],
)
def test_what_can_not_work_is_refused_at_once(endpoints: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RetrievalClient(endpoints, **options)


def test_a_server_can_ask_for_a_longer_pause_but_not_for_a_shorter_one() -> None:
    endpoint = RetrieverEndpoint("http://127.0.0.1:1", 1.0)
    for _ in range(6):
        endpoint.failed(time.monotonic(), 0.0)
    assert endpoint.retry_at - endpoint.failed_at > 3
    endpoint.failed(time.monotonic(), 20.0)
    assert endpoint.retry_at - endpoint.failed_at > 19


def test_an_answer_that_comes_while_the_client_is_closed_disturbs_nobody(server: StandInRetriever) -> None:
    client = RetrievalClient(server.url)
    future: Future[list[RetrievedDocument]] = Future()
    query = PendingQuery("a", 0.0, [future])
    client._pending["a"] = query
    client.close()
    client._resolve([query], [[]])
    with pytest.raises(RuntimeError, match="closed"):
        future.result()


def test_closing_ends_searches_that_wait(server: StandInRetriever) -> None:
    server.stop()
    client = RetrievalClient(server.url, patience_s=60)

    async def close_soon() -> None:
        waiting = asyncio.ensure_future(client.search("a"))
        await asyncio.sleep(0.2)
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            await waiting
        with pytest.raises(RuntimeError, match="closed"):
            await client.search("b")

    asyncio.run(close_soon())
    for thread in client._threads:
        thread.join(within(2))
        assert not thread.is_alive()
    server.start()
