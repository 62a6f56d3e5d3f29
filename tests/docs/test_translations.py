"""A page and its translation say the same: what can be compared without reading either language is compared."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from guides import GUIDES, ROOT, blocks, is_first

SHORT = ROOT / "docs" / "recipe.zh.md"
"""It is shorter than the English page, and has tests of its own."""
TRANSLATED = [guide for guide in GUIDES if not is_first(guide) and guide != SHORT]
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
LANGUAGES = re.compile(r"\[(中文|English)\]\([^)]*\)|中文: \[.*?\]\([^)]*\)")
"""Links from a page to its other language."""

DIFFERENT = {
    "README.zh.md": {"文档"},  # the English index is by subject, the Chinese one says which pages there are
}
"""Sections, by the translation's heading, that are not compared."""


class Section(NamedTuple):
    heading: str
    level: int
    prose: str
    rows: list[str]


def original_of(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh.", "."))


@cache
def sections(page: Path) -> list[Section]:
    """The page's parts from heading to heading, without its blocks of code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = LANGUAGES.sub("", re.sub(r"<!--.*?-->", "", text))
    found = [Section("", 0, "", [])]
    for line in text.splitlines():
        if heading := re.match(r"(#+) (.*)", line):
            found.append(Section(heading[2], len(heading[1]), heading[2] + "\n", []))
        elif line.startswith("|"):
            found[-1].rows.append(line)
        else:
            found[-1] = found[-1]._replace(prose=found[-1].prose + line + "\n")
    return found


def codes(text: str) -> set[str]:
    """Inline code, whatever the line breaks in it."""
    return {" ".join(match[2].split()) for match in CODE.finditer(text)}


def numbers(text: str) -> Counter[str]:
    """Numbers in digits outside of code, addresses and names such as Search-R1."""
    text = LINK.sub("]", CODE.sub(" ", text))
    text = re.sub(r"(\d{1,2}) November (\d{4})", r"\2 年 11 月 \1", text)
    text = re.sub(r"(\d+) million", lambda match: f"{match[1]}00 万", text)
    return Counter(re.findall(r"(?<![A-Za-z])(?<![A-Za-z]-)\d+(?:[.,]\d+)*", text))


def targets(text: str) -> set[str]:
    """Where links lead, by the English page's name and without the part behind `#`, which headings decide."""
    found = (match["target"].partition("#")[0] for match in LINK.finditer(CODE.sub(" ", text)))
    return {target.replace(".zh.md", ".md") for target in found if target}


def cells(row: str) -> int:
    return len(re.split(r"(?<!\\)\|", CODE.sub("", row)))


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.name)
def test_a_translation_says_what_its_original_says(page: Path) -> None:
    here, there = sections(page), sections(original_of(page))
    assert [one.level for one in here] == [one.level for one in there], "headings"
    found: list[str] = []
    for ours, theirs in zip(here, there, strict=True):
        if ours.heading in DIFFERENT.get(page.name, ()):
            continue
        if [cells(row) for row in ours.rows] != [cells(row) for row in theirs.rows]:
            found.append(f"{ours.heading}: other rows")
            continue
        for text, original in zip([ours.prose, *ours.rows], [theirs.prose, *theirs.rows], strict=True):
            place = f"{ours.heading}: {text.strip()[:60]!r}"
            for what in (codes, numbers, targets):
                one, other = what(text), what(original)
                if one != other:
                    found.append(f"{place}: {what.__name__}: only here {one - other}, only there {other - one}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", [*TRANSLATED, SHORT], ids=lambda page: page.name)
def test_a_translation_links_to_translations(page: Path) -> None:
    linked = {match["target"].partition("#")[0] for match in LINK.finditer(LANGUAGES.sub("", page.read_text()))}
    english = {one for one in linked if one.endswith(".md") and ".zh." not in one}
    better = {one for one in english if (page.parent / one).with_suffix(".zh.md").exists()}
    better -= {original_of(page).name}  # for more than the translation has
    assert not better, "link to the Chinese page"


def test_a_translation_has_the_same_blocks() -> None:
    """Commands to the letter; in what is shown, comments may be translated."""
    assert TRANSLATED
    for guide in TRANSLATED:
        pairs = [
            [
                (one.language, one.kind, one.what, one.text if one.language == "sh" else without_comments(one.text))
                for one in blocks(page)
            ]
            for page in (guide, original_of(guide))
        ]
        assert pairs[0] == pairs[1], f"{guide.name} and {original_of(guide).name} differ"


def without_comments(text: str) -> str:
    return re.sub(r"\s+#.*$", "", text, flags=re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """The names that a forge gives to headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.append(name if name not in found else f"{name}-{found.count(name)}")
    return set(found)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_headings_that_are_there(page: Path) -> None:
    text = CODE.sub(" ", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    for match in LINK.finditer(text):
        target, _, anchor = match["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), match["target"]
        if anchor and other.suffix == ".md":
            assert anchor in anchors(other), match["target"]
            assert other.is_relative_to(ROOT)


def table_rows(page: Path) -> Iterator[list[str]]:
    """Cells of the rows that begin with a key of the recipe."""
    for line in page.read_text().splitlines():
        if re.match(r"\| `[\w.*]+` \|", line):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_short_recipe_has_keys_and_defaults_of_the_whole_one() -> None:
    """The English reference is made from the schema."""
    words = {"not set": "不设", "required": "必填", "see above": "见上"}
    whole = {key: words.get(default, default) for key, _, default, *_ in table_rows(ROOT / "docs" / "recipe.md")}
    short = {key: default for key, default, *_ in table_rows(SHORT)}
    assert len(short) > 70
    assert {key: default for key, default in short.items() if whole.get(key) != default} == {}


def test_the_short_recipe_names_keys_of_other_systems_that_migrate_maps_so() -> None:
    mapped: list[tuple[str, str, str]] = []
    for report in (ROOT / "tests" / "migrate" / "golden").glob("*/report.txt"):
        system = report.parent.name.partition("_")[0].replace("search", "verl")
        for line in report.read_text().splitlines():
            if match := re.match(r"  (?:\S+:\d+: )?([\w.]+)=.*(?: -> |; here )(.*)$", line):
                mapped.append((system, f".{match[1]}", match[2]))
    wrong = []
    for key, _, _, *others in table_rows(SHORT):
        pattern = re.escape(key.strip("`")).replace(re.escape("*"), r"\w+")
        own = re.compile(rf"(^|, ){pattern}[.:]")
        for system, cell in zip(("verl", "roll", "rlinf"), others, strict=True):
            for other in re.findall("`(.+?)`", cell):
                found = [ours for name, theirs, ours in mapped if name == system and theirs.endswith(f".{other}")]
                if not any(map(own.search, found)):
                    wrong.append(f"{system}: {other} -> {key}")
    assert not wrong, "\n".join(wrong)
