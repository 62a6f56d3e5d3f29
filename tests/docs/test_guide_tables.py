"""The tables of `docs/guides.md`: both languages say the same, and every command in them is run by a test."""

import re
import shlex
from pathlib import Path

import pytest
from commands import corral
from guide_commands import run
from guides import GUIDES, ROOT, block, blocks
from runs import write_recipe

PAGES = (ROOT / "docs" / "guides.md", ROOT / "docs" / "guides.zh.md")
GOLDEN = ROOT / "tests" / "migrate" / "golden"
ELSEWHERE = {
    "corral submit recipe.yaml --env WANDB_API_KEY --no-wait": "cluster/test_jobs_run.py:"
    "test_code_and_variables_are_on_the_nodes_that_use_them",
    "corral status runs/agentic_pipeline": "view/test_terminal_view.py:test_the_commands_of_the_guide_run",
}
"""Commands that are run by tests under other names."""
TYPED = ("corral ", "docker ", "pip ", "ssh ", "sbatch ", "dstack ", "RAY_AUTH_MODE=")
SOURCES = {
    1: {1: "roll_guide_two_nodes/input.yaml"},
    2: {83: "rlinf_shared_devices/input.yaml", 105: "rlinf_devices_apart/input.yaml"},
    3: {1: "roll_guide_one_device/input.yaml"},
    4: {163: "verl_dstack/input.sh", 548: "verl_slurm/input.sh"},
    5: {1: "search_r1_multinode/input.sh"},
}
"""What stands in the guide of each table, by the line in which its training begins."""
BEGINS = re.compile(r"^(?:cluster:|ray job submit|PYTHONUNBUFFERED=1 srun)", re.MULTILINE)


def rows(page: Path) -> list[tuple[int, list[str]]]:
    """The cells of each row, with the number of the table."""
    found, table = [], 0
    for line in page.read_text().splitlines():
        table += line.startswith("## ")
        if line.startswith("| ") and not line.startswith("| ---"):
            found.append((table, [cell.strip() for cell in line.strip("|").split(" | ")]))
    return found


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def typed(table: int | None = None) -> dict[str, str]:
    """Commands of Corral's columns, without where their output goes, and what their row says of them."""
    own = [cells for number, cells in rows(PAGES[0]) if table in (None, number)]
    found = {code.partition(" > ")[0]: cells[3] for cells in own for cell in cells[2:] for code in codes(cell)}
    return {command: note for command, note in found.items() if command.startswith(TYPED)}


def run_by_blocks() -> set[str]:
    shown = [one for guide in GUIDES for one in blocks(guide) if one.kind == "run"]
    return {numberless(command.partition(" > ")[0]) for one in shown for command in one.commands}


def numberless(command: str) -> str:
    return re.sub(r"(?<= )\d+$", "N", command)


def printed_here(table: int | None = None) -> list[str]:
    """Commands that need nothing but the guide or a recipe, and are in no block."""
    shown = run_by_blocks()
    return [one for one in typed(table) if one.startswith(("corral launch", "corral migrate")) and one not in shown]


def test_both_languages_have_the_same_rows_commands_and_numbers() -> None:
    english, chinese = map(rows, PAGES)
    assert [(table, len(cells)) for table, cells in english] == [(table, len(cells)) for table, cells in chinese]
    for (_, first), (_, second) in zip(english, chinese, strict=True):
        assert len(first) == 4
        for one, other in zip(first, second, strict=True):
            assert sorted(codes(one)) == sorted(codes(other)), first
            left, right = (re.sub(r"`[^`]*`", "", cell) for cell in (one, other))
            assert sorted(re.findall(r"\d+", left)) == sorted(re.findall(r"\d+", right)), first


def test_every_command_of_the_tables_is_run_by_a_test_or_says_what_it_needs() -> None:
    shown, printed = run_by_blocks(), printed_here()
    assert len(printed) > 10
    for command, note in typed().items():
        is_shown = any(one == numberless(command) or one.startswith(f"{command} ") for one in shown)
        assert is_shown or command in printed or command in ELSEWHERE or "Needs " in note, command
    for test in ELSEWHERE.values():
        file, _, name = test.partition(":")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text()


def guide_of(table: int) -> str:
    """A page with that guide's training in the lines that the table names."""
    page = ""
    for line, source in SOURCES[table].items():
        text = (GOLDEN / source).read_text()
        if (begin := BEGINS.search(text)) and line > 1:
            page += "\n" * (line - 1 - page.count("\n") - text.count("\n", 0, begin.start()))
        page += f"{text}\nAnd then:\n"
    return page


@pytest.mark.slow
@pytest.mark.parametrize("table", SOURCES)
def test_what_the_tables_print_is_printed(table: int, tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    (tmp_path / "logs").mkdir()
    (tmp_path / ("guide.rst" if table == 2 else "guide.md")).write_text(guide_of(table))
    for command in [one for one in printed_here(table) if f"{one} > recipe.yaml" != block("guides").commands[0]]:
        made = corral(tmp_path, *shlex.split(command)[1:])
        assert made.code == 0, f"{command}: {made.stderr}"
        assert made.stdout or command == "corral migrate guide.rst", command


@pytest.mark.slow
@pytest.mark.parametrize("table", [1, 3, 5])
def test_a_guide_becomes_a_recipe_that_is_planned_and_tried(table: int, tmp_path: Path) -> None:
    (tmp_path / "guide.md").write_text(guide_of(table))
    _, plan, tried = run(tmp_path, block("guides"))
    assert "trajectories ->" in plan
    assert "step 1/1" in tried
