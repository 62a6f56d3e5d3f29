"""Chinese next to the English of plan, migrate and the first errors, where the locale is Chinese."""

import re

import pytest
from guides import ROOT, messages

from corral.api import load_recipe
from corral.cli.chinese import SENTENCES, TITLES, add_chinese, is_chinese
from corral.cli.main import print_error
from corral.recipe.plan import make_plan

ZH = {"LANG": "zh_CN.UTF-8"}


def has_chinese(text: str) -> bool:
    return re.search("[\u4e00-\u9fff]", text) is not None


def test_every_text_is_one_that_corral_prints() -> None:
    composed = {"`{}` is not a key; did you mean `{}`?", "could not be loaded:", "`{}` has no effect"}
    sources = [text for text in messages() if "SENTENCES = {" not in text]
    missing = [
        english
        for english in (SENTENCES | TITLES).keys() - composed
        if not any(all(part in source for part in english.replace("`", "{}").split("{}")) for source in sources)
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("recipe", ["quickstart", "qwen2.5-7b-lora", "sft", "frozen_lake"])
def test_every_title_of_a_plan_has_a_chinese_one(recipe: str) -> None:
    plan = make_plan(load_recipe(ROOT / "recipes" / f"{recipe}.yaml"))
    _, *lines = add_chinese(plan.text(), ZH).splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert len(titles) > 5
    assert not [line for line in titles if not has_chinese(line)]
    assert add_chinese(plan.text(), {"LANG": "C.UTF-8"}) == plan.text()


def test_every_title_of_a_report_has_a_chinese_one() -> None:
    reports = (ROOT / "tests" / "migrate" / "golden").glob("*/report.txt")
    titles = {line for report in reports for line in report.read_text().partition("\n== ")[0].splitlines()}
    titles = {line for line in titles if line and not line.startswith(" ")}
    assert len(titles) > 50
    assert not [line for line in titles if not has_chinese(add_chinese(line, ZH))]


def test_errors_of_a_newcomer_have_chinese() -> None:
    """Those of the first sections of the page of symptoms, which says what a newcomer meets."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    first = page[page.index("## Installation") : page.index("## During rollout")]
    cells = re.findall(r"^\| (?:`` (.+?) ``|`(.+?)`) \| ", first, re.MULTILINE)
    errors = [(one or other).replace("...", "`X`") for one, other in cells]
    assert len(errors) > 35
    assert not [error for error in errors if not has_chinese(add_chinese(f"error: {error}", ZH))]


def test_an_error_stays_as_it_is_with_chinese_below(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert print_error("r.yaml:5: `batch.n` is not a key; did you mean `batch.samples_per_prompt`?", 2) == 2
    english, chinese = capsys.readouterr().err.splitlines()
    assert english == "error: r.yaml:5: `batch.n` is not a key; did you mean `batch.samples_per_prompt`?"
    assert chinese.strip() == "没有 `batch.n` 这个键；你要写的可能是 `batch.samples_per_prompt`"


def test_the_locale_is_read_as_programs_do() -> None:
    assert is_chinese({"LANG": "zh_CN.UTF-8"})
    assert is_chinese({"LC_ALL": "", "LC_MESSAGES": "zh_TW", "LANG": "C"})
    assert not is_chinese({"LC_ALL": "C.UTF-8", "LANG": "zh_CN.UTF-8"})
    assert not is_chinese({})
