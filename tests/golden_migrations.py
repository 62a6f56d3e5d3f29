"""Golden files of migrations: what is written for another system, with the recipe and the report that come of it.

A folder of `tests/migrate/golden` is a case: `input.sh` or `input.yaml`, which is migrated as a file, or `command.txt`;
and what comes out, `recipe.yaml` and `report.txt`, or where it is refused `error.txt`.

The first paragraph of `command.txt` has words: `--system NAME`, then `--file NAME` for a YAML file of the folder, then
overrides. Every other paragraph is a variant, with more overrides behind these; `report.txt` says what they change: the
fates of keys, values of the recipe, problems.

python tests/golden_migrations.py [NAME ...]    writes what comes out, of all cases or of these: look at the diff
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corral.migrate.config import RawConfig, add_file, add_override
from corral.migrate.config_sources import migrate_file, table_of
from corral.migrate.migration import Migration, entry_text, migrate, recipe_text, report_text, value_text
from corral.recipe.errors import UserError
from corral.recipe.plan import make_plan

GOLDEN = Path(__file__).parent / "migrate" / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir())
OUTPUTS = ("recipe.yaml", "report.txt", "error.txt")


def outputs(case: Path) -> dict[str, str]:
    """The texts of the files that come out of a case."""
    if not (case / "command.txt").exists():
        [source] = case.glob("input.*")
        return migrated(lambda: migrate_file(source)).files(f"{case}/")
    paragraphs = re.split(r"\n\s*\n", (case / "command.txt").read_text().strip())
    first, *variants = [shlex.split(paragraph, comments=True) for paragraph in paragraphs]
    base = migrated(lambda: migrate_words(case, first))
    files = base.files(f"{case}/")
    for words in variants:
        changes = migrated(lambda words=words: migrate_words(case, [*first, *words])).changes(base)
        files["report.txt"] += "\n".join(["", f"== {' '.join(words)}", *changes, ""])
    return files


def migrate_words(case: Path, words: Sequence[str]) -> Migration:
    [option, system, *rest] = words
    assert option == "--system"
    config = RawConfig()
    if rest[:1] == ["--file"]:
        add_file(config, case / rest[1])
        rest = rest[2:]
    for word in rest:
        add_override(config, word, "command")
    return migrate(table_of(system), config.flat(), problems=config.problems)


@dataclass
class Migrated:
    """A migration, or the reasons why there is none."""

    made: Migration | None = None
    problems: list[str] = field(default_factory=list)

    def files(self, folder: str) -> dict[str, str]:
        problems = "".join(f"{problem}\n" for problem in self.problems).replace(folder, "")
        if self.made is None:
            return {"error.txt": problems}
        report = report_text(self.made, every_key=True).replace(folder, "") + "\n"
        return {"recipe.yaml": recipe_text(self.made), "report.txt": report + problems}

    def changes(self, base: "Migrated") -> Iterator[str]:
        yield from (f"  refused: {problem}" for problem in self.problems)
        before = base.fates()
        yield from (fate for fate in self.fates() if fate not in before)
        old, new = base.values(), self.values()
        yield from (f"  + {path}: {value}" for path, value in new.items() if old.get(path) != value)
        yield from (f"  - {path}" for path in old if path not in new and self.made is not None)

    def fates(self) -> list[str]:
        return [f"  {one.outcome.status}: {entry_text(one)}" for one in self.made.entries] if self.made else []

    def values(self) -> dict[str, str]:
        settings = self.made.settings.items() if self.made else ()
        return {".".join(path): value_text(setting.value) for path, setting in settings}


def migrated(make: Callable[[], Migration]) -> Migrated:
    try:
        made = make()
    except UserError as error:
        return Migrated(problems=str(error).splitlines())
    try:
        make_plan(made.recipe)
    except UserError as error:
        return Migrated(made, [f"the plan: {line}" for line in str(error).splitlines()])
    return Migrated(made)


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        for file in OUTPUTS:
            (GOLDEN / name / file).unlink(missing_ok=True)
        for file, text in outputs(GOLDEN / name).items():
            (GOLDEN / name / file).write_text(text)
