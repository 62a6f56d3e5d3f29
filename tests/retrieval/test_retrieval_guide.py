"""The commands of docs/retrieval.md."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from asking import serving
from commands import corral
from deadlines import within
from docstrings import write_corpus
from guides import Block, block

pytestmark = pytest.mark.xdist_group("retriever")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl", number=20, length=80)
    return tmp_path


def run(folder: Path, one: Block, **replaced: str) -> list[str]:
    said = []
    for command in one.commands:
        for text, other in replaced.items():
            command = command.replace(text, other)
        result = corral(folder, *shlex.split(command)[1:])
        assert result.code == 0, result.stderr
        said.append(result.stdout)
    return said


def test_bm25_is_estimated_built_and_searched(folder: Path) -> None:
    estimated, built, _ = run(folder, block("retriever-bm25"))
    assert "memory to serve" in estimated
    assert "20 passages" in built


@pytest.mark.slow
def test_a_dense_index_is_built_and_searched(folder: Path, minilm: Path) -> None:
    _, found = run(folder, block("retriever-dense"), **{"intfloat/e5-base-v2": str(minilm)})
    assert found.count("\n") == 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_it_is_served_and_asked(folder: Path) -> None:
    run(folder, block("retriever-bm25"))
    [command] = block("retriever-serve").commands
    assert command == "corral retriever serve index --port 8000"
    with serving(folder, "index") as served:
        retrieve, health = (
            subprocess.check_output(shlex.split(line.replace("http://127.0.0.1:8000", served.url)), timeout=within(30))
            for line in block("retriever-ask").commands
        )
    assert {"document", "score"} == json.loads(retrieve)["result"][0][0].keys()
    assert json.loads(health)["ready"] is True
