"""How much of what others publish is read, and whether it is read as bash would run it.

python tests/upstream.py FOLDER     FOLDER has checkouts named verl, verl-recipe, Search-R1, ROLL and RLinf, or some

Scripts are run in bash with commands that only write down their words (see bash_oracle.py): run this on checkouts that
you trust. Prints for each checkout how many are read, why others are refused, and which differ from bash.
"""

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bash_oracle import run_in_bash

from corral.migrate.config_sources import migrate_file, read_sources
from corral.model.families import checked_plan
from corral.recipe.errors import RecipeError, UserError

FILES = {
    "verl": ["examples/**/*.sh"],
    "verl-recipe": ["**/*.sh"],
    "Search-R1": ["*.sh", "scripts/**/*.sh", "example/**/*.sh"],
    "ROLL": ["examples/**/*.yaml"],
    "RLinf": ["examples/**/*.sh", "examples/**/config/*.yaml", "examples/reasoning/config/*/*.yaml"],
}
OTHER_KIND = re.compile("which is not migrated|starts a training that is known|none of its keys")


def main(folder: Path) -> int:
    num_different = 0
    for name, patterns in FILES.items():
        if not (folder / name).is_dir():
            continue
        os.chdir(folder / name)
        files = sorted({path for pattern in patterns for path in Path().glob(pattern)})
        refused = Counter[str]()
        num_read = num_unsupported = 0
        for path in files:
            try:
                migration = migrate_file(path)
                checked_plan(migration.recipe)  # as `corral migrate` does
                num_read += 1
                num_unsupported += bool(migration.unsupported)
            except UserError as error:
                refused[reason(error)] += 1
        num_other = sum(count for text, count in refused.items() if OTHER_KIND.search(text))
        print(f"{name}: {len(files)} files, {num_other} of another kind; {num_read} of the other", end=" ")
        print(f"{len(files) - num_other} are read, {num_unsupported} of these with keys that are unsupported")
        for text, count in refused.most_common():
            print(f"  {count:4} refused: {text}")
        scripts = [path for path in files if path.suffix == ".sh"]
        num_compared, different = 0, list[str]()
        for path, differences in compared(scripts):
            num_compared += 1
            different += [f"  {path}: {line}" for line in differences]
        print(f"  {num_compared} compared with bash, {len({line.partition(': ')[0] for line in different})} different")
        print("\n".join(different), end="\n" * bool(different))
        num_different += len(different)
    return int(num_different > 0)


def reason(error: UserError) -> str:
    """The first line, without file, line and value."""
    return re.sub(r"^\S+: ", "", re.sub(r"=[^`]*`", "=...`", str(error).splitlines()[0]))[:160]


def compared(scripts: list[Path]) -> Iterator[tuple[Path, list[str]]]:
    """Scripts that bash takes to one training and that are read, with what is different."""
    with tempfile.TemporaryDirectory() as scratch:
        copies = []
        for path in scripts:
            copy = Path(scratch) / "checkout" / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            # the oracle sources scripts, and then a last `\` without a line behind it would be a word
            copy.write_text(path.read_text() + "\n")
            copies.append(copy)
        work = Path(scratch) / "work"
        for path, copy, passed in zip(scripts, copies, run_in_bash(copies, Path(scratch)), strict=True):
            try:
                source, *_ = read_sources(path.read_text(), copy, None, str(work))
            except RecipeError:
                continue
            found = [words for words in passed if source.program in words]
            if len(found) != 1 or any(word.unknown is not None for word in source.words):
                continue
            read, ran = source.texts[1:], found[0][found[0].index(source.program) + 1 :]
            yield path, [] if read == ran else [f"read {one!r}, bash {other!r}" for one, other in pairs(read, ran)]


def pairs(read: list[str], ran: list[str]) -> Iterator[tuple[str, str]]:
    """The words that are different, a few of them."""
    only_read, only_ran = ([one for one in words if one not in others] for words, others in ((read, ran), (ran, read)))
    for place in range(min(3, max(len(only_read), len(only_ran), 1))):
        yield " ".join(only_read[place : place + 1]), " ".join(only_ran[place : place + 1])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
