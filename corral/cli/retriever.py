"""`corral retriever build`, `serve` and `search`."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corral.cli.planning import AsJson, examples
from corral.recipe.errors import UserError

if TYPE_CHECKING:
    from corral.retrieval.searcher import Retriever

app = typer.Typer(
    no_args_is_help=True,
    help="Search over a corpus of passages: build an index, serve it.",
    epilog=examples("corral retriever build corpus.jsonl index", "corral retriever serve index --port 8000"),
)
Index = Annotated[Path, typer.Argument(help="The folder of the index.")]
CorpusMoved = Annotated[Path | None, typer.Option("--corpus", help="Where the corpus is now, if it was moved.")]
EncoderMoved = Annotated[str | None, typer.Option("--encoder", help="Where the encoder is now, if it was moved.")]
Device = Annotated[str | None, typer.Option(help="Device of the encoder: cpu, cuda, cuda:1.")]
IndexDevice = Annotated[str, typer.Option(help="Device on which vectors are compared: cpu; cuda with faiss-gpu.")]
RerankerName = Annotated[str | None, typer.Option(help="A cross-encoder that orders what was found.")]
Candidates = Annotated[int, typer.Option(min=1, help="Passages that the re-ranker looks at for each query.")]
FOR_VECTORS = (
    "encoder", "query_encoder", "query_prefix", "passage_prefix", "pooling", "max_tokens", "batch", "half", "device"
)  # fmt: skip
FOR_WORDS = ("language", "k1", "b")


@app.command(
    epilog=examples(
        "corral retriever build corpus.jsonl index",
        "corral retriever build corpus.jsonl index --kind flat --encoder intfloat/e5-base-v2 --dry-run",
    )
)
def build(
    context: typer.Context,
    corpus: Annotated[Path, typer.Argument(help='JSONL file: {"id", "contents"} or {"id", "title", "text"}.')],
    index: Annotated[Path, typer.Argument(help="Folder of the index to make.")],
    kind: Annotated[str, typer.Option(help="bm25 (words), flat (vectors, exact) or hnsw (vectors, fast).")] = "bm25",
    encoder: Annotated[str | None, typer.Option(help="Encoder for vectors: a sentence-transformers model.")] = None,
    query_encoder: Annotated[str | None, typer.Option(help="Encoder of queries, if another one, as in DPR.")] = None,
    query_prefix: Annotated[str | None, typer.Option(help="Text before each query, if not the encoder's own.")] = None,
    passage_prefix: Annotated[str | None, typer.Option(help="Text before each passage.")] = None,
    pooling: Annotated[str | None, typer.Option(help="Pooling: mean or cls, if not what the model says.")] = None,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens to which the encoder truncates a text.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Passages in a batch of the encoder.")] = 64,
    half: Annotated[bool, typer.Option("--half", help="Store vectors in 16 bits.")] = False,
    made: Annotated[
        Path | None, typer.Option("--from", help="An index of this corpus to use: a file of faiss, a folder of bm25s.")
    ] = None,
    device: Device = None,
    language: Annotated[str, typer.Option(help="BM25: language of stop words and stemming, or none.")] = "english",
    k1: Annotated[float, typer.Option(min=0, help="BM25: saturation of repeated words.")] = 1.5,
    b: Annotated[float, typer.Option(min=0, max=1, help="BM25: normalization by the length of passages.")] = 0.75,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only estimate size and time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: for programs.")] = False,
) -> None:
    """Make an index. The same command again goes on with one that was stopped (flat, hnsw)."""
    from corral.recipe.memory import human_bytes
    from corral.retrieval.bm25 import Bm25Settings
    from corral.retrieval.dense import DenseSettings, EncoderSettings
    from corral.retrieval.estimate import estimate, of_index
    from corral.retrieval.index import build as build_index
    from corral.retrieval.index import encoder_name
    from corral.retrieval.searcher import check_kind

    if pooling not in (None, "mean", "cls"):
        raise UserError(f"--pooling {pooling} is neither mean nor cls")
    if kind == "bm25":
        refuse_given(context, FOR_VECTORS, "on a bm25 index; say --kind flat or --kind hnsw")
    check_kind(kind, encoder is not None)
    if kind != "bm25":
        refuse_given(context, FOR_WORDS, f"on a {kind} index; say --kind bm25")
    if made is not None:
        refuse_given(context, ("half", "k1", "b", "dry_run"), "with --from, which is an index already")
    if not dry_run:
        refuse_given(context, ("as_json",), "without --dry-run")
    dense = None
    if encoder is not None:
        names = encoder_name(encoder), None if query_encoder is None else encoder_name(query_encoder)
        dense = DenseSettings(
            EncoderSettings(*names, query_prefix, passage_prefix, pooling, max_tokens=max_tokens), half
        )
    bm25 = Bm25Settings(k1, b, language)
    if dry_run:
        cost = estimate(corpus, kind, bm25=bm25, dense=dense, device=device, batch=batch)
        print(json.dumps(asdict(cost), indent=2) if as_json else "\n".join(cost.lines()))
        return
    with progress_shown() as show:
        build_index(
            corpus,
            index,
            kind,
            bm25=bm25,
            dense=dense,
            device=device,
            batch=batch,
            made=made,
            progress=show,
            report=print,
        )
    built = of_index(index)
    print(f"{kind} index of {built.num_passages:,} passages in {index}, {human_bytes(built.disk_bytes)}")


def refuse_given(context: typer.Context, names: tuple[str, ...], where: str) -> None:
    """Raises for options that would be ignored. `names`: of the function's parameters."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = next(one.opts[0] for one in context.command.params if one.name == name)
            raise UserError(f"{option} has no effect {where}")


@app.command(epilog=examples("corral retriever serve index --port 8000 --topk 3"))
def serve(
    context: typer.Context,
    index: Annotated[Path | None, typer.Argument(help="The folder of the index.")] = None,
    online: Annotated[Path | None, typer.Option(help="YAML file of a search service, instead of an index.")] = None,
    host: Annotated[str, typer.Option(help="Address; if not loopback, needs a token or --insecure.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8000,
    topk: Annotated[int, typer.Option(min=1, help="Passages for each query, where a request does not say.")] = 3,
    reranker: RerankerName = None,
    candidates: Candidates = 10,
    token_file: Annotated[Path | None, typer.Option(help="File with the bearer token that each request needs.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Other machines may search without a token.")] = False,
    max_queries: Annotated[int, typer.Option(min=1, help="Most queries in one request.")] = 4096,
    max_topk: Annotated[int, typer.Option(min=1, help="Most passages for a query.")] = 100,
    max_passages: Annotated[int, typer.Option(min=1, help="Most passages in one answer: queries times topk.")] = 20_480,
    max_query_chars: Annotated[int, typer.Option(min=1, help="Most characters of a query.")] = 8192,
    max_body: Annotated[int, typer.Option(min=1, help="Most bytes of one request.")] = 16 * 2**20,
    max_waiting: Annotated[int, typer.Option(min=1, help="Most queries that may wait; more are refused.")] = 8192,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request fails.")] = 25.0,
    corpus: CorpusMoved = None,
    encoder: EncoderMoved = None,
    device: Device = None,
    index_device: IndexDevice = "cpu",
) -> None:
    """Answer POST /retrieve over HTTP, as Search-R1's servers do; also GET /health and GET /metrics."""
    from corral.http_server import token_for
    from corral.retrieval.server import ServerLimits
    from corral.retrieval.server import serve as run_server

    if (index is None) == (online is None):
        raise UserError("say what to search: the folder of an index, or --online with a file about a service")
    token = token_for(host, token_file, insecure)
    if topk > max_topk:
        raise UserError(f"--topk {topk} is more than --max-topk {max_topk}")
    if online is not None:
        refuse_given(context, ("corpus", "encoder", "index_device"), "on a search service; it is for an index")
    if reranker is None:
        refuse_given(context, ("candidates",), "without --reranker")
    limits = ServerLimits(max_body, max_queries, max_topk, max_passages, max_query_chars, max_waiting, timeout)
    load = loader(index, online, corpus, encoder, reranker, candidates, device, index_device)
    run_server(load, host, port, token=token, topk=topk, limits=limits, report=lambda text: print(text, flush=True))


@app.command(epilog=examples("corral retriever search index 'capital of France' --topk 5"))
def search(
    context: typer.Context,
    index: Index,
    query: Annotated[str, typer.Argument(help="Text to search for.")],
    topk: Annotated[int, typer.Option(min=1, help="Number of passages.")] = 3,
    reranker: RerankerName = None,
    candidates: Candidates = 10,
    corpus: CorpusMoved = None,
    encoder: EncoderMoved = None,
    device: Device = None,
    index_device: IndexDevice = "cpu",
    as_json: AsJson = False,
) -> None:
    """Search once, without a server."""
    from corral.retrieval.searcher import SearchRequest
    from corral.retrieval.server import format_result

    if reranker is None:
        refuse_given(context, ("candidates",), "without --reranker")
    retriever = loader(index, None, corpus, encoder, reranker, candidates, device, index_device)()
    [found] = retriever.retrieve([SearchRequest([query], topk)])
    if as_json:
        print(json.dumps(format_result(found, return_scores=True)["result"][0], indent=2, ensure_ascii=False))
    elif not found[0]:
        print("nothing found")
    else:
        for place, one in enumerate(found[0], 1):
            print(f"{place}. {one.score:.4f}  [{one.passage.id}] {' '.join(one.passage.contents.split())[:300]}")


def loader(
    index: Path | None,
    online: Path | None,
    corpus: Path | None,
    encoder: str | None,
    reranker: str | None,
    candidates: int,
    device: str | None,
    index_device: str,
) -> "Callable[[], Retriever]":
    """Returns a function that loads the index. What is quickly seen to be wrong raises here."""
    from corral.retrieval.index import encoder_name, open_index, read_finished
    from corral.retrieval.online import OnlineSearcher, read_online
    from corral.retrieval.searcher import Reranker, Retriever, Searcher

    service: Searcher | None = None
    if online is not None:
        settings = read_online(online)
        service = OnlineSearcher(settings, os.environ.get(settings.key_env) if settings.key_env else None)
    else:
        assert index is not None
        if read_finished(index).kind == "bm25" and encoder is not None:
            raise UserError(f"--encoder has no effect on {index}: it is a bm25 index")
        if read_finished(index).kind == "bm25" and index_device != "cpu":
            raise UserError(f"--index-device has no effect on {index}: it is a bm25 index")

    moved_to = None if encoder is None else encoder_name(encoder)

    def load() -> Retriever:
        searcher = service if index is None else open_index(index, corpus, device, moved_to, index_device)
        assert searcher is not None
        second = None if reranker is None else Reranker(encoder_name(reranker), device)
        return Retriever(searcher, second, candidates)

    return load


@contextmanager
def progress_shown() -> "Iterator[Callable[[str, int, int], None]]":
    """Shows one line: what is done, how much of it, and the time that is left."""
    import time

    from corral.observe.console import duration
    from corral.observe.status_line import StatusLine

    line = StatusLine()
    began: dict[str, tuple[float, int]] = {}

    def show(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        since, at_first = began.setdefault(what, (now, done))
        left = ""
        if done > at_first and now - since > 2:
            left = f", {duration((now - since) * (total - done) / (done - at_first))} left"
        line.show(what, f": {100 * done / max(1, total):.1f} %{left}")

    try:
        yield show
    finally:
        line.clear()
