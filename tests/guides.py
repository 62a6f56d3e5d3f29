"""The commands in the guides, so that tests run what users read.

A block of commands has a comment before it: `<!-- run: NAME -->` if a test runs it, `<!-- needs: WHAT -->` if that
needs what a test does not have.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDES = (ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
NOTE = re.compile(r"^<!-- (?P<kind>run|needs): (?P<what>.+) -->$")


@dataclass(frozen=True)
class Block:
    guide: Path
    line: int
    language: str
    kind: str | None
    what: str
    text: str

    @property
    def commands(self) -> list[str]:
        """One per line, those that go over several joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


@cache
def blocks(guide: Path) -> tuple[Block, ...]:
    text, found = guide.read_text(), []
    for fence in re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, fence.start())
        note = NOTE.match(text.splitlines()[line - 1]) if line else None
        kind, what = (note["kind"], note["what"]) if note else (None, "")
        found.append(Block(guide, line + 1, fence[1], kind, what, fence[2]))
    return tuple(found)


def block(name: str) -> Block:
    """The one that a test runs."""
    [found] = [
        one for guide in GUIDES for one in blocks(guide) if one.kind == "run" and one.what == name and is_first(guide)
    ]
    return found


def is_first(guide: Path) -> bool:
    """Not a translation, whose commands are the same."""
    return ".zh." not in guide.name


@cache
def messages() -> tuple[str, ...]:
    """The sources of Corral with texts that go over several lines joined, in which what it prints can be looked for."""
    return tuple(joined(path) for suffix in ("py", "js") for path in sorted((ROOT / "corral").rglob(f"*.{suffix}")))


def joined(path: Path) -> str:
    return re.sub(r'"\s*\n\s*(\+ )?f?"', "", path.read_text()).replace("{{", "{").replace("}}", "}").replace('\\"', '"')
