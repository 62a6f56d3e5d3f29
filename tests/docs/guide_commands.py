"""What tests of guides do with a page: write the files that it shows, and run its commands."""

import re
import shlex
from pathlib import Path

from commands import corral
from guides import ROOT, Block, blocks


def files_of(page: str, folder: Path) -> None:
    """Writes every file that the page shows into the folder."""
    for one in blocks(ROOT / "docs" / page):
        named = re.match(r"# (\S+\.(py|yaml))\n", one.text)
        if named:
            (folder / named[1]).write_text(one.text)


def run(folder: Path, one: Block, *more: str, **replaced: str) -> list[str]:
    """Runs every command of a block, and returns what each wrote to standard output, which goes into a file where the
    command says so."""
    said = []
    for command in one.commands:
        for text, other in replaced.items():
            command = command.replace(text, other)
        words, _, out = command.partition(" > ")
        name, *arguments = shlex.split(words)
        assert name == "corral"
        result = corral(folder, *arguments, *more)
        assert result.code == 0, result.stderr
        if out:
            (folder / out).write_text(result.stdout)
        said.append(result.stdout)
    return said
