"""BM25 in the format of bm25s, built in a stream and searched where it lies.

bm25s indexes a list that it holds in memory, three times over. Here the corpus is read once, and the words of each
passage go to temporary files as numbers; when all are counted, the matrix of scores is filled block by block through
mapped files. What is held in memory is the vocabulary and one block. Scores are those of bm25s to the last bit, and
bm25s itself can load the result (`bm25s.BM25.load`).

Its `retrieve` looks at every passage for every query. The search here looks at those that have a word of the query.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from corral.data.words import words_and_pairs
from corral.recipe.errors import UserError
from corral.retrieval.searcher import Corpus, Hit, Progress, retriever_extra, silent

LANGUAGES = ("english", "german", "french", "spanish", "italian", "portuguese", "dutch", "russian", "swedish", "none")
WORD = re.compile(r"\b\w\w+\b")
"""A word, as bm25s has it."""
DATA, INDICES, INDPTR = (f"{name}.csc.index.npy" for name in ("data", "indices", "indptr"))
VOCABULARY, PARAMETERS = "vocab.index.json", "params.index.json"
TEMPORARY = {"terms": np.int32, "counts": np.int32, "words": np.int32, "distinct": np.int32}
"""For each word of each passage, which it is and how often it is there; for each passage, all and distinct words."""
BLOCK = 6_000_000
"""Entries of the matrix that are put in their places at once, in about 300 MB of memory."""
BATCH = 2_000

Split = Callable[[str], list[str]]


@dataclass(frozen=True)
class Bm25Settings:
    k1: float = 1.5
    b: float = 0.75
    language: str = "english"
    """Language of stop words, which are left out, and of the stemmer. `none`: neither is used."""


def check_bm25(settings: Bm25Settings) -> None:
    """What would be missing at the end, before the corpus is read."""
    splitter(settings.language)
    with retriever_extra():
        import bm25s  # noqa: F401


def build_bm25(corpus: Corpus, folder: Path, settings: Bm25Settings, progress: Progress = silent) -> None:
    num_words = count_words(corpus, folder, splitter(settings.language), progress)
    num_entries = (folder / "terms.tmp").stat().st_size // 4
    if num_entries == 0:
        raise UserError(f"{corpus.path} has no words to search for; is its language {settings.language}?")
    entries = {name: np.memmap(folder / f"{name}.tmp", dtype, "r") for name, dtype in TEMPORARY.items()}
    fill(entries, folder, num_words, settings, progress)
    write_parameters(folder / PARAMETERS, len(corpus), settings)
    del entries
    for name in TEMPORARY:
        (folder / f"{name}.tmp").unlink()


def count_words(corpus: Corpus, folder: Path, split: Split, progress: Progress) -> int:
    """Writes the temporary files and the vocabulary. Returns the number of different words."""
    vocabulary: defaultdict[str, int] = defaultdict(count().__next__)
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.tmp").open("wb")) for name in TEMPORARY}
        for start in range(0, len(corpus), BATCH):
            lists: dict[str, list[int]] = {name: [] for name in TEMPORARY}
            for contents in corpus.contents(start, min(start + BATCH, len(corpus))):
                words = split(contents)
                counted = Counter(words)
                lists["terms"] += [vocabulary[word] for word in counted]
                lists["counts"] += counted.values()
                lists["words"].append(len(words))
                lists["distinct"].append(len(counted))
            for name, numbers in lists.items():
                files[name].write(np.array(numbers, TEMPORARY[name]).tobytes())
            progress("counting words", min(start + BATCH, len(corpus)), len(corpus))
    num_words = len(vocabulary)
    vocabulary[""] = num_words  # bm25s gives it to queries without any known word
    with (folder / VOCABULARY).open("w", encoding="utf-8") as file:
        json.dump(vocabulary, file, ensure_ascii=False)
    return num_words


def fill(entries: dict[str, Any], folder: Path, num_words: int, settings: Bm25Settings, progress: Progress) -> None:
    """The matrix: a column for each word, in it the passages that have the word, in order, and the scores it gives."""
    terms, counts, words, distinct = (entries[name] for name in TEMPORARY)
    num_passages, num_entries = len(words), len(terms)
    frequencies = np.zeros(num_words, np.int64)
    for start in range(0, num_entries, BLOCK):
        frequencies += np.bincount(terms[start : start + BLOCK], minlength=num_words)
    ends = np.zeros(num_words + 1, np.int64)
    np.cumsum(frequencies, out=ends[1:])
    np.save(folder / INDPTR, ends)
    heads = ends[:-1].copy()
    data = np.lib.format.open_memmap(folder / DATA, "w+", np.float32, (num_entries,))
    indices = np.lib.format.open_memmap(folder / INDICES, "w+", np.int32, (num_entries,))
    rarity = inverse_document_frequencies(frequencies, num_passages)
    average = words.sum(dtype=np.int64) / num_passages
    for passages, span in blocks(distinct, num_entries):
        rows = np.repeat(np.arange(passages.start, passages.stop, dtype=np.int32), distinct[passages])
        norms = settings.k1 * ((1 - settings.b) + settings.b * words[passages].astype(np.int64) / average)
        times = counts[span].astype(np.float32)
        scores = rarity[terms[span]] * (times / (np.repeat(norms, distinct[passages]) + times))
        order = np.argsort(terms[span], kind="stable")
        present, firsts, numbers = np.unique(terms[span][order], return_index=True, return_counts=True)
        places = np.arange(len(order)) + np.repeat(heads[present] - firsts, numbers)
        data[places] = scores[order]
        indices[places] = rows[order]
        heads[present] += numbers
        progress("writing the index", span.stop, num_entries)
    data.flush()
    indices.flush()


def blocks(distinct: npt.NDArray[np.int32], num_entries: int) -> Iterator[tuple[slice, slice]]:
    """Passages, and their entries, so many that a block is about as large as it may be."""
    at_once = max(1, BLOCK * len(distinct) // num_entries)
    entry = 0
    for start in range(0, len(distinct), at_once):
        passages = slice(start, min(start + at_once, len(distinct)))
        number = int(distinct[passages].sum(dtype=np.int64))
        yield passages, slice(entry, entry + number)
        entry += number


def inverse_document_frequencies(frequencies: npt.NDArray[np.int64], num_passages: int) -> npt.NDArray[np.float32]:
    """Inverse document frequencies as Lucene has them. By math.log, whose last bit is not always that of numpy's."""
    different, which = np.unique(frequencies, return_inverse=True)
    values = [math.log(1 + (num_passages - n + 0.5) / (n + 0.5)) for n in different.tolist()]
    return np.array(values, np.float32)[which]


def write_parameters(path: Path, num_passages: int, settings: Bm25Settings) -> None:
    """What bm25s wants to know when it loads the rest."""
    with retriever_extra():
        import bm25s
    parameters = {
        "k1": settings.k1, "b": settings.b, "delta": 0.5, "method": "lucene", "idf_method": "lucene",
        "dtype": "float32", "int_dtype": "int32", "num_docs": num_passages, "version": bm25s.__version__,
        "backend": "numpy",
    }  # fmt: skip
    path.write_text(json.dumps(parameters, indent=4))


def splitter(language: str) -> Split:
    """Words as bm25s splits them, with its stop words and PyStemmer's stems; in every language, Chinese and other text
    without spaces in pairs of characters."""
    if language not in LANGUAGES:
        raise UserError(f"`{language}` is not a language for BM25; there are: {', '.join(LANGUAGES)}")
    if language == "none":
        return lambda text: words_and_pairs(text.lower(), WORD.findall)
    with retriever_extra():
        import Stemmer
        from bm25s import stopwords
    name = "STOPWORDS_EN" if language == "english" else f"STOPWORDS_{language.upper()}"
    stop, stems = frozenset(getattr(stopwords, name)), Stemmer.Stemmer(language)

    def find_words(text: str) -> list[str]:
        found: list[str] = stems.stemWords([word for word in WORD.findall(text) if word not in stop])
        return found

    return lambda text: words_and_pairs(text.lower(), find_words)


class Bm25Searcher:
    kind, num_threads, merges, about = "bm25", 1, True, ""

    def __init__(self, folder: Path, corpus: Corpus, settings: Bm25Settings) -> None:
        self.corpus, self.split = corpus, splitter(settings.language)
        self.data, self.indices = (np.load(folder / name, mmap_mode="r") for name in (DATA, INDICES))
        self.ends = np.load(folder / INDPTR)
        self.vocabulary: dict[str, int] = json.loads((folder / VOCABULARY).read_text(encoding="utf-8"))
        self.num_passages: int | None = len(corpus)
        self.totals = np.zeros(len(corpus), np.float32)
        self.lock = Lock()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        found = []
        for query in queries:
            with self.lock:
                rows, scores = self.best(query, k)
            found.append([Hit(self.corpus[row], score) for row, score in zip(rows, scores, strict=True)])
        return found

    def best(self, query: str, k: int) -> tuple[list[int], list[float]]:
        """Passages without a word of the query are not found, however few others there are."""
        terms = [self.vocabulary[word] for word in self.split(query) if word in self.vocabulary]
        spans = [slice(self.ends[term], self.ends[term + 1]) for term in terms]
        if not spans:
            return [], []
        for span in spans:  # one after the other: the same sum in the same order as in bm25s
            self.totals[self.indices[span]] += self.data[span]
        each_once = {span.start: span for span in spans}.values()
        touched = np.concatenate([self.indices[span] for span in each_once])
        scores = self.totals[touched]
        enough = k * len(each_once)  # a passage is in there once for each of its words
        kept = touched
        if len(touched) > enough:
            kept = touched[scores >= np.partition(scores, -enough)[-enough]]
        rows = np.unique(kept)
        totals = self.totals[rows]
        order = np.lexsort((rows, -totals))[:k]
        self.totals[touched] = 0
        return rows[order].tolist(), totals[order].tolist()
