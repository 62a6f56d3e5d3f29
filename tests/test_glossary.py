"""The code, the pages and what is printed speak the field's language: words of the old private one do not come back."""

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = sorted((ROOT / "corral").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.append(ROOT / "corral" / "view" / "page" / "language.js")
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

INSTEAD = {
    r"play(s|ed|ing|er|ers|ground)?": "roll out, generate, RolloutWorker, RolloutScheduler",
    r"learnt|learners?": "trained, TrainerGroup",
    r"dull": "zero-variance group",
    r"mend(s|ed|ing|er)?": "recovery, Supervisor",
    r"ordinals?": "prompt id",
    r"parcels?": "transfer handle",
    r"doubts?": "warnings",
    r"forget_gradients": "zero_grad",
    r"optimisers?": "optimizer",
    r"lam": "gae_lambda",
    r"told|said": "reported, printed",
    r"in_words": "describe, format",
    r"set_aside|set aside": "preempt, archive",
    r"make_room|make room|makes room": "evict",
    r"openings?": "prefill",
    r"who sees whom|sees whom": "attention mask",
    r"floors?|ceilings?": "random and optimal baseline",
    r"玩": "rollout, 采样",
    r"学会|学到|学得|个学|(?<!强化)(?<!监督)(?<!机器)学习(?!率)": "训练",
    r"词元": "token",
    r"回合": "轮次",
    r"下限|上限和": "随机策略与最优策略的基线",
    r"守卫": "校验",
    r"点名": "指出, 列出",
    r"遍数": "epoch 数",
    r"批次的?算术": "批次大小的换算",
    r"收工|人齐|齐步": "关闭, 到齐, 异步",
    r"没人认识": "无法识别",
}
"""Old words, as identifiers or parts of them and as words of a text, and what is written instead. The Chinese ones are
those of the same metaphors, and idioms of English translated word by word."""

ALLOWED = {
    "corral/envs/": {"play", "plays", "played", "playing"},  # games are played
    "corral/envs/games.py": {"opening"},  # the first message of a game, a key of its prompts
    "corral/envs/baselines.py": {"player"},  # part of a random seed: another word gives other numbers
    "corral/envs/built_in/frozen_lake.py": {"player"},  # the board's figure
    "corral/envs/built_in/gymnasium.py": {"player"},  # the board's figure
    "corral/envs/built_in/sokoban.py": {"player", "floor"},  # the board's figure and cells
    "corral/envs/base.py": {"told"},  # the old name of an option
    "docs/environments.md": {"play", "played", "player", "opening", "floor"},  # games, their boards and prompts
    "recipes/frozen_lake.yaml": {"opening"},  # the key of a game's prompts
    "recipes/search.yaml": {"play"},  # Hamlet
    "corral/algorithms/corrections.py": {"floor"},  # lower bound of a band: the recipe's key
    "corral/recipe/renamed_keys.py": {"optimiser", "lam"},  # the old names themselves
    "corral/migrate/": {"lam"},  # keys of other systems
    "corral/migrate/roll/environment_tags.py": {"opening"},  # the key of a game's prompts
    "corral/migrate/roll/runs_and_algorithms.py": {"floor"},  # the correction's key
    "corral/migrate/verl/algorithm.py": {"floor"},  # the correction's key
    "corral/migrate/rlinf/devices_and_trainers.py": {"floor"},  # math.floor
    "corral/migrate/shell_lexer.py": {"opening"},  # brackets
    "docs/algorithms.md": {"floor"},  # the correction's key
    "docs/recipe.zh.md": {"lam"},  # keys of other systems
    "docs/recipe.md": {"floor"},  # the correction's key
    "corral/cluster/launchers/slurm.py": {"ordinal"},  # a variable of AMD's driver
    "corral/data/sampler.py": {"ordinal"},  # a key in checkpoints of earlier releases
    "corral/observe/ledger.py": {"played"},  # a key in ledgers of earlier releases
}


@cache
def words_of(path: Path) -> list[tuple[int, str]]:
    """Line and text of every identifier, comment and string of a program, or of every line of a page."""
    text = path.read_text()
    if path.suffix != ".py":
        return list(enumerate(text.splitlines(), 1))
    kinds = (tokenize.NAME, tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(token.start[0], token.string) for token in tokens if token.type in kinds]


@cache
def joined_words() -> str:
    """All of it, to see quickly that a word is nowhere."""
    return "\n".join(text for path in [*CODE, *PAGES, *RECIPES] for _, text in words_of(path))


def allowed_in(path: Path) -> set[str]:
    name = str(path.relative_to(ROOT))
    return {word for place, words in ALLOWED.items() if name.startswith(place) for word in words}


@pytest.mark.xdist_group("glossary")
@pytest.mark.parametrize("old", INSTEAD, ids=lambda old: old.split("(")[0].split("|")[0])
def test_an_old_word_does_not_come_back(old: str) -> None:
    pattern = re.compile(rf"(?<![A-Za-z])(?:{old})(?![A-Za-z])", re.IGNORECASE)
    if not pattern.search(joined_words()):
        return
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in [*CODE, *PAGES, *RECIPES]
        for line, text in words_of(path)
        for match in pattern.finditer(text)
        if match[0].lower() not in allowed_in(path)
    ]
    assert not found, f"write {INSTEAD[old]} instead:\n" + "\n".join(found[:40])


def test_names_of_classes_are_unique() -> None:
    found: dict[str, list[str]] = {}
    for path in CODE:
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1 and not name.startswith("_")} == {}


def test_names_of_files_say_what_is_in_them() -> None:
    """Two files of one name differ only in their folders; `__init__.py` is Python's."""
    names: dict[str, list[str]] = {}
    for path in CODE:
        if path.name != "__init__.py":
            names.setdefault(path.name, []).append(str(path.parent.relative_to(ROOT)))
    twice = {name: folders for name, folders in names.items() if len(folders) > 1}
    assert set(twice) <= SAME_NAME, twice


SAME_NAME: set[str] = set()
"""Files whose folder makes it plain."""
