"""The re-ranker behind a search, and search by somebody else's service."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from asking import Service, search_service, serving
from deadlines import within
from docstrings import QUERIES
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from corral.recipe.errors import RunError, UserError
from corral.retrieval.client import RetrievalClient, RetrievedDocument
from corral.retrieval.index import open_index
from corral.retrieval.online import OnlineSearcher, OnlineSettings, read_online
from corral.retrieval.searcher import Reranker, Retriever, SearchRequest

pytestmark = pytest.mark.xdist_group("retriever")


@pytest.fixture(scope="module")
def cross_encoder(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random one: its order is as good as any for seeing whether it is kept."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("cross-encoder")
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder


def cross_scores(folder: Path, query: str, texts: list[str]) -> list[float]:
    """By transformers alone, one pair at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [
            model(**tokenizer(query, text, truncation=True, return_tensors="pt")).logits.sigmoid().item()
            for text in texts
        ]


@pytest.mark.slow
def test_each_query_is_compared_with_its_own_candidates_only(bm25_index: Path, cross_encoder: Path) -> None:
    searcher = open_index(bm25_index)
    asks = [SearchRequest(QUERIES[:2], 3, 6), SearchRequest([QUERIES[2]], 2)]
    answers = Retriever(searcher, Reranker(str(cross_encoder), "cpu"), num_candidates=4).retrieve(asks)
    flat = [own for answer in answers for own in answer]
    for query, width, topk, own in zip(QUERIES, (6, 6, 4), (3, 3, 2), flat, strict=False):
        [candidates] = searcher.search([query], width)
        scores = cross_scores(cross_encoder, query, [one.passage.contents for one in candidates])
        expected = sorted(zip(scores, (one.passage.id for one in candidates), strict=True), reverse=True)[:topk]
        assert [one.passage.id for one in own] == [name for _, name in expected]
        assert [one.score for one in own] == pytest.approx([score for score, _ in expected], abs=1e-4)


@pytest.mark.slow
def test_search_r1s_reranked_body_is_understood(bm25_index: Path, cross_encoder: Path, tmp_path: Path) -> None:
    with serving(tmp_path, str(bm25_index), "--reranker", str(cross_encoder), "--device", "cpu") as served:
        body = {"queries": QUERIES[:1], "topk_retrieval": 8, "topk_rerank": 2, "return_scores": True}
        [own] = served.ask("/retrieve", body).json["result"]
        [plain] = served.ask("/retrieve", {**body, "return_scores": False}).json["result"]
        assert served.ask("/health").json["reranker"] is True
    [candidates] = open_index(bm25_index).search(QUERIES[:1], 8)
    scores = cross_scores(cross_encoder, QUERIES[0], [one.passage.contents for one in candidates])
    assert [item["score"] for item in own] == pytest.approx(sorted(scores, reverse=True)[:2], abs=1e-4)
    assert plain == [item["document"] for item in own]


@pytest.fixture
def service() -> Iterator[Service]:
    with search_service() as found:
        yield found


def settings_for(service: Service, **more: object) -> OnlineSettings:
    return OnlineSettings.model_validate(
        {
            "url": service.url + "/find?q={query}&n={topk}",
            "results": "web.results",
            "title": "page.name",
            "id": "link",
            **more,
        }
    )


def test_results_of_a_service_have_the_shape_of_passages(service: Service) -> None:
    searcher = OnlineSearcher(settings_for(service, key_env="KEY", headers={"X-Key": "{key}"}), "secret")
    [found] = searcher.search(["a & b {key}"], 2)
    assert [(one.passage.id, one.passage.contents, one.score) for one in found] == [
        ("http://x/0", '"T0"\ntext 0', 1.0),
        ("http://x/1", '"T1"\ntext 1', 0.5),
    ]
    [(path, headers, _)] = service.requests
    assert path == "/find?q=a%20%26%20b%20%7Bkey%7D&n=2"
    assert headers["X-Key"] == "secret"


def test_a_service_can_be_asked_with_a_body(service: Service) -> None:
    body = {"q": "{query}", "num": "{topk}", "keys": ["{key}"]}
    OnlineSearcher(settings_for(service, body=body), None).search(['say "hi"'], 3)
    assert json.loads(service.requests[0][2]) == {"q": 'say "hi"', "num": 3, "keys": [""]}


def test_what_goes_wrong_elsewhere_is_one_line_without_the_key(service: Service, tmp_path: Path) -> None:
    service.status = 429
    searcher = OnlineSearcher(settings_for(service, url=service.url + "/?k={key}", key_env="KEY"), "secret")
    with pytest.raises(RunError, match="answered with 429") as raised:
        searcher.search(["a"], 1)
    assert "secret" not in str(raised.value)
    (tmp_path / "online.yaml").write_text(f"{{url: '{service.url}', results: web.results}}\n")
    with serving(tmp_path, "--online", "online.yaml") as served:
        reply = served.ask("/retrieve", {"queries": ["a"]})
        assert (reply.status, reply.json) == (502, {"error": "online search: the service answered with 429"})
        service.status = 200
        assert (
            served.ask("/retrieve", {"queries": ["a", "b"], "topk": 2}).json["result"][1][1]["contents"] == '""\ntext 1'
        )
        assert served.ask("/health").json["kind"] == "online"


def test_a_wrong_place_of_the_results_is_named(service: Service) -> None:
    with pytest.raises(RunError, match=r"the answer has no `pages` \(`results: web.pages`\)"):
        OnlineSearcher(settings_for(service, results="web.pages"), None).search(["a"], 1)


def test_an_answer_without_the_list_is_believed_once_it_was_seen(service: Service) -> None:
    searcher = OnlineSearcher(settings_for(service), None)
    assert len(searcher.search(["a"], 2)[0]) == 2
    service.finds = False
    assert searcher.search(["b"], 2) == [[]]


def test_the_queries_of_one_request_are_asked_at_the_same_time(service: Service, tmp_path: Path) -> None:
    """64 in one request of the client; none of the first eight is answered before all of them are asked."""
    service.may_answer.clear()
    (tmp_path / "online.yaml").write_text(
        f"{{url: '{service.url}/?q={{query}}', results: web.results, concurrency: 8}}\n"
    )
    with serving(tmp_path, "--online", "online.yaml") as served:
        client = RetrievalClient(served.url, topk=2, batch_wait_s=within(10))

        async def all_at_once() -> list[list[RetrievedDocument]]:
            searches = asyncio.gather(*(client.search(f"query {number}") for number in range(64)))
            async with asyncio.timeout(within(20)):
                while len(service.requests) < 8:
                    await asyncio.sleep(0.01)
            service.may_answer.set()
            return await searches

        found = asyncio.run(all_at_once())
        client.close()
    assert [len(documents) for documents in found] == [2] * 64
    assert len(service.requests) == 64


def test_a_service_that_points_elsewhere_is_not_followed(service: Service) -> None:
    service.status = 302
    with pytest.raises(RunError, match="answered with 302"):
        OnlineSearcher(settings_for(service), None).search(["a"], 1)


def test_what_is_wrong_in_the_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "online.yaml").write_text("url: ftp://x\nresult: a\nconcurrency: 0\ntimeout_s: 0\n")
    with pytest.raises(UserError) as raised:
        read_online(tmp_path / "online.yaml")
    for problem in (
        "url: Value error, must begin with http",
        "results: Field required",
        "result: Extra inputs",
        "concurrency: Input should be greater than or equal to 1",
        "timeout_s: Input should be greater than 0",
    ):
        assert problem in str(raised.value)
    with pytest.raises(UserError, match="variable MY_KEY"):
        OnlineSearcher(OnlineSettings(url="http://x", key_env="MY_KEY", results="a"), None)
