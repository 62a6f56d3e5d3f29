"""No command in a guide that nobody tries."""

import re
from pathlib import Path

import pytest
from guides import GUIDES, ROOT, blocks

COMMAND = re.compile(
    r"^\s*(\$ )?(corral|make|pip|ray|sbatch|dstack|docker|podman|kubectl|ssh|git|python) ", re.MULTILINE
)
QUOTED = ("text", "yaml", "json", "python", "Dockerfile")
"""Languages of blocks that show something and are not typed."""


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_every_block_of_commands_is_run_by_a_test_or_says_what_it_needs(guide: Path) -> None:
    for one in blocks(guide):
        if one.language not in QUOTED and (one.language == "sh" or COMMAND.search(one.text)):
            assert one.language == "sh", f"{guide.name}:{one.line}: commands are in ```sh blocks"
            assert one.kind is not None, (
                f"{guide.name}:{one.line}: <!-- run: NAME --> or <!-- needs: WHAT --> is missing"
            )


def test_every_name_is_used_by_a_test() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for one in (one for guide in GUIDES for one in blocks(guide)):
        if one.kind == "run":
            assert f'block("{one.what}")' in tests, f"{one.guide.name}:{one.line}: no test runs {one.what}"
