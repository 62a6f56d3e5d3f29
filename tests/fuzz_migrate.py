"""Broken configurations of other systems: whatever is in them, a reader says what is wrong or makes a recipe.

python tests/fuzz_migrate.py 100000               so many for each reader, with a line about what they were
python tests/fuzz_migrate.py 100000 "roll yaml"   for one of them
"""

import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from corral.migrate.config_sources import migrate_file, migrate_words
from corral.migrate.migration import recipe_text, report_text
from corral.recipe.errors import RecipeError, UserError
from corral.recipe.plan import make_plan

GOLDEN = Path(__file__).parent / "migrate" / "golden"
PIECES = [
    *"${}()[]'\"`\\|&;<>=:,.#~@*!%^-+ \t\n0\x00é√",
    *("${a}", "$(touch hit)", "`touch hit`", "eval(1)", "__import__('os').system('touch hit')", "list(range(0,4))"),
    *("list(range(0,10**9))", "0-99999999", "null", "true", "[", "{", "1e-6", "1e999", "-1", "0", "nan", ".inf", "&a"),
    *("*a", "!!python/object:os.system", "<<: *a", "${oc.env:HOME}", "${eval:1}", "...", "=", "a.b=c", "\n  - x\n"),
]
"""What goes wrong most easily, or worst."""


def broken(text: str, rng: random.Random) -> str:
    """Some pieces cut out, doubled, moved or put in."""
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 1, 2, 5, 30)))
        piece = rng.choice((rng.choice(PIECES), text[start:end] * 2, "", text[rng.randrange(len(text) + 1) :][:20]))
        text = text[:start] + piece + text[end:]
    return text


def broken_value(text: str, rng: random.Random) -> str:
    """A whole value replaced, so that what is behind the syntax meets it too."""
    places = list(re.finditer(r"(?<=[=:])[^\s\\=:][^\s\\]*", text))
    if not places:
        return text
    place = rng.choice(places)
    return text[: place.start()] + rng.choice(PIECES).strip() + text[place.end() :]


def as_file(name: str) -> Callable[[str, Path], object]:
    def read(text: str, folder: Path) -> object:
        path = folder / name
        path.write_text(text)
        return migrate_file(path)

    return read


def as_words(text: str, _: Path) -> object:
    return migrate_words(text.split(" "), "verl")


def overrides_of(name: str) -> str:
    return " ".join(re.findall(r"[a-z_]+\.[\w.]+=[^\s\\]+", (GOLDEN / name).read_text()))


def written(*names: str) -> list[str]:
    return [(GOLDEN / name).read_text() for name in names]


READERS: dict[str, tuple[list[str], Callable[[str, Path], object]]] = {
    "verl script": (written("verl_dstack/input.sh", "verl_submit/input.sh"), as_file("a.sh")),
    "verl words": ([overrides_of("verl_dstack/input.sh")], as_words),
    "search_r1 script": (written("search_r1_multinode/input.sh"), as_file("b.sh")),
    "roll yaml": (written("roll_guide_two_nodes/input.yaml", "roll_guide_one_device/input.yaml"), as_file("c.yaml")),
    "rlinf yaml": (written("rlinf_shared_devices/input.yaml", "rlinf_devices_apart/input.yaml"), as_file("d.yaml")),
}


def fuzz(reader: str, number: int, folder: Path, seed: int = 0) -> Counter[str]:
    """How many were read, and how many refused. Any error but a RecipeError goes through."""
    texts, read = READERS[reader]
    rng, found = random.Random(f"{reader} {seed}"), Counter[str]()
    for _ in range(number):
        text = rng.choice((broken, broken_value))(rng.choice(texts), rng)
        try:
            made = read(text, folder)
        except RecipeError:
            found["refused"] += 1
            continue
        except Exception:
            print(repr(text), file=sys.stderr)
            raise
        recipe_text(made), report_text(made)  # type: ignore[arg-type]
        try:
            make_plan(made.recipe)  # type: ignore[attr-defined]
            found["read"] += 1
        except UserError:
            found["read, and refused by the plan"] += 1
        except Exception:
            print(repr(text), file=sys.stderr)
            raise
    return found


if __name__ == "__main__":
    for reader in sys.argv[2:] or READERS:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            counts = fuzz(reader, int(sys.argv[1]), Path(folder))
        print(f"{reader}: {dict(counts)} in {time.monotonic() - start:.0f} s", flush=True)
