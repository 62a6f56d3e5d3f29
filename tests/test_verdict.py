"""What fails a submission, and what is repeated: tests of tests, by pytest in folders of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CONFTEST = """\
import sys
sys.path.insert(0, {tests!r})
import verdict
def pytest_addoption(parser):
    parser.addoption("--share")
def pytest_configure(config):
    config.addinivalue_line("markers", "deadline(why)")
    if not hasattr(config, "workerinput") and config.option.share:
        config.pluginmanager.register(verdict.Verdict(config.option.share))
"""
LATE = """\
import pathlib, pytest
@pytest.mark.deadline("it is late the first time")
@pytest.mark.parametrize("number", range({number}))
def test_late(number):
    file = pathlib.Path(f"been_here{{number}}")
    if not file.exists():
        file.touch()
        assert False
"""
WRONG = """\
def test_wrong():
    assert 1 == 2
"""
SKIPPED = """\
import pytest
def test_skipped():
    pytest.skip("tini is missing")
"""


def run(folder: Path, **files: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST.format(tests=str(Path(__file__).parent)))
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-n", "0", "--share", "abc"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_late_tests_are_repeated_alone_and_named_last(tmp_path: Path) -> None:
    code, output = run(tmp_path, late=LATE.format(number=2), fine="def test_fine(): pass")
    assert code == 0
    assert [line for line in output.splitlines() if line][-2:] == [
        f"late, and passed when it was repeated alone: test_late.py::test_late[{number}]" for number in range(2)
    ]


def test_a_wrong_number_is_a_failure_at_once(tmp_path: Path) -> None:
    code, output = run(tmp_path, late=LATE.format(number=1), wrong=WRONG)
    assert code == 1
    assert "again" not in output


def test_a_deadline_that_is_missed_twice_is_a_failure(tmp_path: Path) -> None:
    always = LATE.format(number=1).replace("file.touch()", "")
    code, output = run(tmp_path, late=always)
    assert code == 1
    assert "again" in output
    assert "late, and passed" not in output


def test_a_late_test_that_is_skipped_when_repeated_did_not_pass(tmp_path: Path) -> None:
    code, output = run(tmp_path, late=LATE.format(number=1) + "    else:\n        pytest.skip('not now')\n")
    assert code == 1
    assert "1 skipped" in output


def test_more_than_five_late_tests_are_a_failure(tmp_path: Path) -> None:
    code, output = run(tmp_path, late=LATE.format(number=6))
    assert code == 1
    assert "6 tests with deadlines failed, which is more than 5" in output


def test_what_is_skipped_and_not_listed_is_a_failure(tmp_path: Path) -> None:
    code, output = run(tmp_path, skipped=SKIPPED)
    assert code == 1
    assert "skipped, but not in tests/skips.txt: test_skipped.py::test_skipped: Skipped: tini is missing" in output


def test_a_module_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    code, _ = run(tmp_path, broken="import nothing_of_this_name")
    assert code != 0
