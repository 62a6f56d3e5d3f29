"""BM25 against a brute-force reference, and against bm25s's own indexing, to the last bit."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import bm25s
import numpy as np
import pytest
import Stemmer
from docstrings import QUERIES, contents

from corral.retrieval import bm25
from corral.retrieval.bm25 import Bm25Searcher, Bm25Settings
from corral.retrieval.index import build, open_index


def reference(texts: list[str], query: str, k1: float = 1.5, b: float = 0.75) -> dict[int, float]:
    """Lucene's BM25, as it stands in a textbook; passages with a score."""
    documents = [Counter(words(text)) for text in texts]
    lengths = [sum(counts.values()) for counts in documents]
    average = sum(lengths) / len(lengths)
    scores: dict[int, float] = {}
    for word in words(query):
        containing = sum(word in counts for counts in documents)
        idf = math.log(1 + (len(texts) - containing + 0.5) / (containing + 0.5))
        for row, counts in enumerate(documents):
            if counts[word]:
                gain = idf * counts[word] / (counts[word] + k1 * (1 - b + b * lengths[row] / average))
                scores[row] = scores.get(row, 0.0) + gain
    return scores


def words(text: str) -> list[str]:
    kept = [word for word in re.findall(r"\w\w+", text.lower()) if word not in bm25s.stopwords.STOPWORDS_EN]
    return list(Stemmer.Stemmer("english").stemWords(kept))


@pytest.mark.parametrize("query", [*QUERIES, "return return the the median", "", "xyzzy", "the of"])
def test_what_is_found_is_what_brute_force_finds(bm25_index: Path, corpus_file: Path, query: str) -> None:
    expected = reference(contents(corpus_file), query)
    [found] = open_index(bm25_index).search([query], 10)
    best = sorted(expected.values(), reverse=True)[:10]
    np.testing.assert_allclose([one.score for one in found], best, rtol=1e-5)
    for one in found:
        assert one.score == pytest.approx(expected[int(one.passage.id.removeprefix("doc"))], rel=1e-5)


def test_the_best_three_are_the_first_three_of_the_best_ten(bm25_index: Path) -> None:
    searcher = open_index(bm25_index)
    for few, many in zip(searcher.search(QUERIES, 3), searcher.search(QUERIES, 10), strict=True):
        assert few == many[:3]


@pytest.mark.parametrize("language", ["english", "none"])
@pytest.mark.parametrize("block", [6_000_000, 500])
def test_the_files_are_those_of_bm25s(
    corpus_file: Path, tmp_path: Path, language: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bm25, "BLOCK", block)
    monkeypatch.setattr(bm25, "BATCH", 37)
    build(corpus_file, tmp_path / "index", bm25=Bm25Settings(language=language))
    stems = {"stopwords": "en", "stemmer": Stemmer.Stemmer("english")} if language == "english" else {"stopwords": []}
    tokens = bm25s.tokenize(contents(corpus_file), return_ids=False, show_progress=False, **stems)
    theirs = bm25s.BM25()
    theirs.index(tokens, show_progress=False)
    loaded = bm25s.BM25.load(tmp_path / "index", mmap=True)
    assert loaded.vocab_dict.keys() == theirs.vocab_dict.keys()
    for word, column in theirs.vocab_dict.items():
        if word:
            assert_same_column(loaded.scores, loaded.vocab_dict[word], theirs.scores, column)
    assert sorted(path.suffix for path in (tmp_path / "index").iterdir()) == [".json"] * 3 + [".npy"] * 4


def assert_same_column(
    mine: dict[str, np.ndarray], my_column: int, its: dict[str, np.ndarray], its_column: int
) -> None:
    for name in ("indices", "data"):
        np.testing.assert_array_equal(
            mine[name][mine["indptr"][my_column] : mine["indptr"][my_column + 1]],
            its[name][its["indptr"][its_column] : its["indptr"][its_column + 1]],
        )


def test_scores_are_those_of_bm25s(bm25_index: Path) -> None:
    searcher = open_index(bm25_index)
    assert isinstance(searcher, Bm25Searcher)
    theirs = bm25s.BM25.load(bm25_index, mmap=True)
    for query in QUERIES:
        rows, scores = searcher.best(query, 20)
        assert scores == theirs.get_scores(words(query))[rows].tolist()


def test_a_corpus_in_another_script_is_searched_too(tmp_path: Path) -> None:
    lines = [{"id": "a", "text": "Столица Франции: Париж"}, {"id": "b", "text": "Столица Италии: Рим"}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    build(tmp_path / "c.jsonl", tmp_path / "index", bm25=Bm25Settings(language="russian"))
    [found] = open_index(tmp_path / "index").search(["столица италия"], 2)
    assert [one.passage.id for one in found] == ["b", "a"]


PROVINCES = """
广东|广州|粤|珠江|白切鸡|丹霞山
四川|成都|川|岷江|麻婆豆腐|乐山大佛
湖南|长沙|湘|湘江|剁椒鱼头|张家界
湖北|武汉|鄂|汉江|热干面|黄鹤楼
陕西|西安|陕|渭河|羊肉泡馍|兵马俑
山西|太原|晋|汾河|刀削面|平遥古城
山东|济南|鲁|黄河|糖醋鲤鱼|泰山
河南|郑州|豫|洛河|胡辣汤|少林寺
河北|石家庄|冀|滦河|驴肉火烧|承德避暑山庄
江苏|南京|苏|秦淮河|盐水鸭|中山陵
浙江|杭州|浙|钱塘江|龙井虾仁|西湖
安徽|合肥|皖|淮河|臭鳜鱼|黄山
福建|福州|闽|闽江|佛跳墙|武夷山
江西|南昌|赣|赣江|瓦罐汤|滕王阁
辽宁|沈阳|辽|辽河|锅包肉|沈阳故宫
吉林|长春|吉|松花江|人参鸡|长白山
黑龙江|哈尔滨|黑|牡丹江|红肠|冰雪大世界
甘肃|兰州|甘|洮河|牛肉拉面|莫高窟
青海|西宁|青|湟水|手抓羊肉|塔尔寺
云南|昆明|滇|澜沧江|过桥米线|石林
贵州|贵阳|黔|乌江|酸汤鱼|黄果树瀑布
海南|海口|琼|南渡江|文昌鸡|天涯海角
台湾|台北|台|浊水溪|卤肉饭|日月潭
广西|南宁|桂|漓江|螺蛳粉|象鼻山
西藏|拉萨|藏|雅鲁藏布江|酥油茶|布达拉宫
"""
"""Name, capital, short name, river, dish, sight."""


def test_questions_in_chinese_find_their_passages(tmp_path: Path) -> None:
    """By pairs of characters. The words of jieba 0.42.1 find all 50, too; whole clauses as words find three."""
    passages, questions = {}, {}
    for name, capital, short, river, dish, sight in (line.split("|") for line in PROVINCES.strip().splitlines()):
        passages[f"{name} 1"] = f"{name}的省会（首府）是{capital}，简称“{short}”，境内有{river}流过。"
        passages[f"{name} 2"] = f"到{name}旅行，可以尝一尝有名的{dish}，再去看看{sight}。"
        questions[f"{capital}是什么地方的省会？"] = f"{name} 1"
        questions[f"请问{sight}在哪里？"] = f"{name} 2"
    lines = [json.dumps({"id": key, "text": text}, ensure_ascii=False) for key, text in passages.items()]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    build(tmp_path / "c.jsonl", tmp_path / "index")
    found = open_index(tmp_path / "index").search(list(questions), 3)
    right = [key in [one.passage.id for one in hits] for key, hits in zip(questions.values(), found, strict=True)]
    assert sum(right) == len(questions) == 50


def test_words_and_pairs_of_characters_stand_side_by_side() -> None:
    split = bm25.splitter("english")
    assert split("Running 首都北京 ７２号 iPhone手机 京") == [
        "run",
        "72",
        "iphon",
        "首都",
        "都北",
        "北京",
        "号",
        "手机",
        "京",
    ]
    assert split("กรุงเทพ ที่") == ["กรุ", "รุง", "งเ", "เท", "ทพ", "ที่"]
