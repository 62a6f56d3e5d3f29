"""What a submission leaves out is chosen, and its age has a bound."""

import json
import subprocess
from hashlib import sha1
from pathlib import Path

import pytest
import selection
from hypothesis import given
from hypothesis import strategies as st
from selection import BUDGET_S, CHEAP_S, MAX_AGE, ONE_OF, Case, choose, read_costs, without_group, write_costs

COMMITS = [sha1(bytes([number])).hexdigest() for number in range(200)]
CASES = [
    *(Case(f"a.py::cheap{function}[{number}]") for function in range(40) for number in range(10)),
    *(Case(f"b.py::dear[{number}]") for number in range(12)),
    *(Case(f"c.py::cluster{number}", has_cluster=True, is_core=number < 5) for number in range(60)),
]
COSTS = {case.id: 20.0 if case.has_cluster else 8.0 if "dear" in case.id else 1.0 for case in CASES}


@pytest.mark.parametrize("commit", COMMITS[:20])
def test_what_is_core_and_each_cheap_function_are_in_every_submission(commit: str) -> None:
    chosen = choose(CASES, COSTS, commit)
    assert {case.id for case in CASES if case.is_core} <= chosen
    assert {case.function for case in CASES if COSTS[case.id] <= CHEAP_S} == {
        case.function for case in CASES if case.id in chosen and COSTS[case.id] <= CHEAP_S
    }
    assert chosen == choose(reversed(CASES), COSTS, commit)


@given(st.floats(0, 2000), st.sampled_from(COMMITS))
def test_the_rest_stays_within_the_budget(budget_s: float, commit: str) -> None:
    always, chosen = choose(CASES, COSTS, commit, budget_s=0), choose(CASES, COSTS, commit, budget_s)
    assert always <= chosen
    assert sum(COSTS[one] for one in chosen) <= max(budget_s, sum(COSTS[one] for one in always))


def test_a_sixth_of_the_rest_is_drawn_and_every_case_in_turn() -> None:
    last, ages, drawn = dict.fromkeys(COSTS, -1), [0], []
    for number, commit in enumerate(COMMITS):
        chosen = choose(CASES, COSTS, commit, BUDGET_S)
        drawn.append(len(chosen))
        for one in chosen:
            ages.append(number - last[one])
            last[one] = number
    assert max(ages) <= MAX_AGE
    always = len(choose(CASES, COSTS, COMMITS[0], 0))
    assert sum(drawn) / len(drawn) == pytest.approx(always + (len(CASES) - always) / ONE_OF, rel=0.1)


def test_costs_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "COSTS", tmp_path / "costs.json")
    assert read_costs() == {}
    write_costs({"b.py::x[a::b]": 1.25, "a.py::y": 3.0})
    assert read_costs() == {"a.py::y": 3.0, "b.py::x[a::b]": 1.2}
    assert without_group("a.py::y[p=a@1]") == "a.py::y[p=a@1]"
    assert without_group("a.py::y[p]@ray") == "a.py::y[p]"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    monkeypatch.setattr(selection, "LAST_FULL", tmp_path / "last-full")
    git(tmp_path, "init", "-q")
    commit(tmp_path, "Makefile")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.check_output(["git", *identity, *arguments], cwd=folder, text=True).strip()


def commit(folder: Path, file: str) -> str:
    (folder / file).write_text("")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "--allow-empty", "-m", file)
    return git(folder, "rev-parse", "HEAD")


def test_everything_is_run_when_the_harness_changed_or_the_last_run_of_everything_is_too_old(repository: Path) -> None:
    assert "no run of all tests" in str(selection.why_everything())
    record = repository / "last-full"
    record.write_text(json.dumps({"commit": commit(repository, "a.py"), "date": "today"}))
    commit(repository, "b.py")
    assert selection.why_everything() is None
    assert selection.age_of_last_full() == "1 commits ago, on today"
    (repository / "Makefile").write_text("changed")
    assert "Makefile changed" in str(selection.why_everything())
    git(repository, "checkout", "-q", "Makefile")
    for _ in range(MAX_AGE):
        commit(repository, "b.py")
    assert f"{MAX_AGE + 1} commits ago" in str(selection.why_everything())
    record.write_text(json.dumps({"commit": "0" * 40}))
    assert "not in this history" in str(selection.why_everything())
