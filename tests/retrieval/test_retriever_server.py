"""The server as its clients see it: a process of its own, asked over HTTP."""

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from asking import Served, Service, load_when_told, search_service, serving
from commands import corral
from deadlines import within
from docstrings import QUERIES

from corral.retrieval.client import RetrievalClient
from corral.retrieval.index import open_index
from corral.retrieval.server import ServerLimits

pytestmark = pytest.mark.xdist_group("retriever")


@pytest.fixture(scope="module")
def served(bm25_index: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    limits = ("--max-queries", "50", "--max-topk", "20", "--max-query-chars", "200", "--max-body", "20000")
    limits = (*limits, "--max-passages", "500")
    with serving(tmp_path_factory.mktemp("served"), str(bm25_index), *limits) as found:
        yield found


def test_with_scores_an_item_has_document_and_score(served: Served, bm25_index: Path) -> None:
    reply = served.ask("/retrieve", {"queries": QUERIES[:2], "topk": 4, "return_scores": True})
    assert reply.status == 200
    expected = [
        [{"document": {"id": one.passage.id, "contents": one.passage.contents}, "score": one.score} for one in own]
        for own in open_index(bm25_index).search(QUERIES[:2], 4)
    ]
    assert reply.json == {"result": expected}


def test_without_scores_an_item_is_the_document(served: Served) -> None:
    scored = served.ask("/retrieve", {"queries": QUERIES[:2], "topk": None, "return_scores": True}).json["result"]
    plain = served.ask("/retrieve", {"queries": QUERIES[:2]}).json["result"]
    assert plain == [[item["document"] for item in own] for own in scored]
    assert [len(own) for own in plain] == [3, 3]
    assert plain[0][0]["contents"].startswith('"')


def test_no_queries_and_no_match_are_answers_too(served: Served) -> None:
    assert served.ask("/retrieve", {"queries": []}).json == {"result": []}
    assert served.ask("/retrieve", {"queries": ["xyzzy", "median"]}).json["result"][0] == []


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{oops", 422, "Invalid JSON"),
        (b"[1]", 422, "object"),
        ({"topk": 3}, 422, "queries: Field required"),
        ({"queries": "one"}, 422, "queries: Input should be a valid"),
        ({"queries": ["a", 3]}, 422, "queries.1: Input should be a valid string"),
        ({"queries": ["a"], "topk": 0}, 422, "topk: Input should be greater than or equal to 1"),
        ({"queries": ["a"], "top_k": 5}, 422, "top_k: Extra inputs"),
        ({"queries": ["a"], "topk": 21}, 413, "topk is 21, at most 20"),
        ({"queries": ["a"] * 51}, 413, "51 queries; at most 50"),
        ({"queries": ["a"] * 50, "topk": 11}, 413, "550 passages (queries x topk); at most 500"),
        ({"queries": ["a", "b" * 201]}, 413, "queries.1 has 201 characters"),
        ({"queries": ["c" * 20000]}, 413, "larger than 20000 bytes"),
        ({"queries": ["a"], "topk_rerank": 2}, 422, "no re-ranker"),
    ],
)
def test_a_bad_request_gets_one_line(served: Served, body: Any, status: int, said: str) -> None:
    reply = served.ask("/retrieve", body)
    assert reply.status == status
    assert said in reply.json["error"]
    assert "\n" not in reply.text


def test_other_paths_and_methods_are_one_line_too(served: Served) -> None:
    assert served.ask("/docs").json["error"].startswith("GET /docs: Not Found")
    assert served.ask("/retrieve").status == 405


def test_health_says_what_is_served(served: Served) -> None:
    reply = served.ask("/health")
    assert reply.status == 200
    assert reply.json == {
        "ready": True, "state": "ready", "kind": "bm25", "passages": 400, "topk": 3, "reranker": False,
    }  # fmt: skip


def test_metrics_count_requests_queries_and_latency(served: Served) -> None:
    names = ("queries_total", "latency_seconds_count", 'requests_total{code="200"}', 'refused_total{reason="limit"}')
    before = [served.metric(name) for name in names]
    served.ask("/retrieve", {"queries": QUERIES[:3]})
    served.ask("/retrieve", {"queries": QUERIES, "topk": 1000})
    assert [served.metric(name) - old for name, old in zip(names, before, strict=True)] == [3, 1, 1, 1]
    assert served.metric("queue_depth") == 0
    assert served.metric('latency_seconds_bucket{le="+Inf"}') == served.metric("latency_seconds_count")


def test_many_clients_get_their_own_answers(served: Served) -> None:
    def ask(number: int) -> bool:
        query, topk = QUERIES[number % len(QUERIES)], number % 5 + 1
        own = served.ask("/retrieve", {"queries": [query], "topk": topk, "return_scores": True}).json["result"][0]
        return bool(own == alone[query][:topk])

    alone = {
        query: served.ask("/retrieve", {"queries": [query], "topk": 5, "return_scores": True}).json["result"][0]
        for query in QUERIES
    }
    with ThreadPoolExecutor(16) as clients:
        assert all(clients.map(ask, range(96)))


@pytest.mark.deadline("one of many answers must come within 30 ms")
def test_a_client_that_stays_connected_does_not_wait_for_the_network(served: Served) -> None:
    """Nagle's algorithm is off: else each answer would be 40 ms late."""
    connection = HTTPConnection(served.url.removeprefix("http://"), timeout=within(10))

    def took_s() -> float:
        began = time.monotonic()
        connection.request("POST", "/retrieve", json.dumps({"queries": QUERIES[:1]}))
        assert len(json.loads(connection.getresponse().read())["result"]) == 1
        return time.monotonic() - began

    assert any(took_s() < 0.03 for _ in range(100))


def test_it_listens_before_it_is_ready(bm25_index: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(bm25_index), ready=False, before=load_when_told) as served:
        health = served.ask("/health")
        assert (health.status, health.json) == (503, {"ready": False, "state": "loading"})
        reply = served.ask("/retrieve", {"queries": ["a"]})
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        assert served.metric("ready") == 0
        (tmp_path / "go").touch()
        served.command.wait_until(lambda: "ready" in served.command.stdout.read_text())
        assert served.ask("/retrieve", {"queries": QUERIES[:1]}).status == 200


def test_sigterm_ends_it_with_code_0(bm25_index: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(bm25_index)) as served:
        served.ask("/health")
        served.command.send(signal.SIGTERM)
        finished = served.command.wait(within(10))
    assert finished.code == 0, finished.stderr
    assert finished.stdout.endswith("ended\n")
    assert not finished.stderr


def test_nothing_is_said_without_the_token(bm25_index: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("open sesame open sesame\n")
    (tmp_path / "token").chmod(0o600)
    with serving(tmp_path, str(bm25_index), "--host", "0.0.0.0", "--token-file", "token") as served:
        for path, body in (("/retrieve", {"queries": ["a"]}), ("/health", None), ("/metrics", None), ("/x", None)):
            assert served.ask(path, body).status == 401
            assert served.ask(path, body, token="wrong").status == 401
        assert served.ask("/retrieve", {"queries": ["a"]}, token="open sesame open sesame").status == 200
        assert served.ask("/health", token="open sesame open sesame").status == 200


def test_other_machines_are_let_in_only_on_purpose(bm25_index: Path, tmp_path: Path) -> None:
    refused = corral(tmp_path, "retriever", "serve", str(bm25_index), "--host", "0.0.0.0")
    assert refused.code == 2
    assert "--token-file" in refused.errors[0]


def test_what_is_beyond_the_queue_is_refused_at_once(tmp_path: Path) -> None:
    """One request is searched, one waits, the third hears 503; then the first two are answered."""
    with full_queue(tmp_path) as (service, served):
        third = served.ask("/retrieve", {"queries": ["third"]})
        assert (third.status, third.headers["Retry-After"]) == (503, "1")
        assert "waiting" in third.json["error"]
        assert served.metric('refused_total{reason="overloaded"}') == 1
    assert [path for path, _, _ in service.requests] == ["/?q=first", "/?q=second"]


def test_a_request_is_refused_before_its_body_if_too_many_wait(tmp_path: Path) -> None:
    with full_queue(tmp_path) as (_, served):
        connection = HTTPConnection(served.url.removeprefix("http://"), timeout=within(10))
        connection.putrequest("POST", "/retrieve")
        connection.putheader("Content-Length", "1000000")
        connection.endheaders()  # and no body
        assert connection.getresponse().status == 503


@contextmanager
def full_queue(folder: Path) -> Iterator[tuple[Service, Served]]:
    """A server with a request that is searched and one that waits; both are answered at the end."""
    with search_service() as service, serving_one_at_a_time(service, folder, "--max-waiting", "1") as served:
        service.may_answer.clear()
        with ThreadPoolExecutor(2) as clients:
            first = clients.submit(served.ask, "/retrieve", {"queries": ["first"]})
            wait_until(lambda: len(service.requests) == 1)
            second = clients.submit(served.ask, "/retrieve", {"queries": ["second"]})
            wait_until(lambda: served.metric("queue_depth") == 1)
            yield service, served
            assert not first.done()
            service.may_answer.set()
            assert [first.result().status, second.result().status] == [200, 200]


def test_what_nobody_waits_for_any_more_is_not_searched(tmp_path: Path) -> None:
    with search_service() as service, serving_one_at_a_time(service, tmp_path, "--max-waiting", "2") as served:
        service.may_answer.clear()
        with ThreadPoolExecutor(1) as clients:
            first = clients.submit(served.ask, "/retrieve", {"queries": ["first"]})
            wait_until(lambda: len(service.requests) == 1)
            connection = HTTPConnection(served.url.removeprefix("http://"), timeout=within(10))
            connection.request("POST", "/retrieve", json.dumps({"queries": ["gone", "gone too"]}))
            wait_until(lambda: served.metric("queue_depth") == 2)
            connection.close()
            wait_until(lambda: served.metric('refused_total{reason="gone"}') == 1)
            last = clients.submit(served.ask, "/retrieve", {"queries": ["last"]})
            service.may_answer.set()
            assert [first.result().status, last.result().status] == [200, 200]
        assert [path for path, _, _ in service.requests] == ["/?q=first", "/?q=last"]


def test_the_server_gives_up_before_its_clients_do() -> None:
    client = RetrievalClient("http://127.0.0.1:1")
    assert ServerLimits().timeout_s < client.timeout_s


@pytest.mark.deadline("the last request must be answered within the 0.2 s that the first ones exceed")
def test_a_request_that_is_not_answered_in_time_is_given_up(tmp_path: Path) -> None:
    with search_service() as service, serving_one_at_a_time(service, tmp_path, "--timeout", "0.2") as served:
        service.may_answer.clear()
        assert "not answered in 0.2 s" in served.ask("/retrieve", {"queries": ["a"]}).json["error"]
        assert served.ask("/retrieve", {"queries": ["b"]}).status == 503
        service.may_answer.set()
        wait_until(lambda: served.ask("/retrieve", {"queries": ["c"]}).status == 200)
        assert [path for path, _, _ in service.requests] == ["/?q=a", "/?q=c"]  # nobody waited for b any more


def test_a_port_that_is_taken_is_one_line(served: Served, bm25_index: Path, tmp_path: Path) -> None:
    port = served.url.rpartition(":")[2]
    result = corral(tmp_path, "retriever", "serve", str(bm25_index), "--port", port)
    assert result.code == 2
    assert result.errors == [
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; see --host, --port"
    ]


@contextmanager
def serving_one_at_a_time(service: Service, folder: Path, *options: str) -> Iterator[Served]:
    (folder / "online.yaml").write_text(f"url: {service.url}/?q={{query}}\nresults: web.results\nconcurrency: 1\n")
    with serving(folder, "--online", "online.yaml", *options) as served:
        yield served


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + within(10)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
