"""Broken versions of documents that are right: texts with pieces cut out, doubled, moved or put in, and trees of values
with nodes replaced, removed, moved or nested."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

PIECES = [
    *"${}()[]'\"`\\|&;<>=:,.#~@*!%^-+ \t\n\r0\x00\x1bé√\ud800\ufeff\u2028",
    *("${a}", "$(touch hit)", "`touch hit`", "eval(1)", "__import__('os').system('touch hit')", "list(range(0,4))"),
    *("list(range(0,10**9))", "0-99999999", "null", "true", "[", "{", "1e-6", "1e999", "-1", "0", "nan", ".inf", "&a"),
    *("*a", "!!python/object:os.system", "<<: *a", "${oc.env:HOME}", "${eval:1}", "...", "=", "a.b=c", "\n  - x\n"),
    *("\\ud800", "\\u0000", "[" * 50, "{" * 50, "9" * 400, "1" + "0" * 5000, "all", "0-3", "- ", "? ", "|\n", "---\n"),
]
"""What goes wrong most easily, or worst."""
LEAVES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 8, 100, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.0, 0.5, -0.5, 1e-9, 1e300),
    *(float("inf"), float("-inf"), float("nan"), "", " ", "a", "0", "1", "-1", "1e400", "null", "true", "nan", ".inf"),
    *("all", "none", "auto", "\x00", "\x1b[2J", "é", "\ud800", "\u202e", "😀" * 10, "a" * 300, "a/b", "../../x", "/"),
    *("${name}", "${oc.env:HOME}", "${a.b}", "{prompt}", "<image>", "a:b", "a.py:b", "module:name", "hf:x", "0-3", "~"),
    *([], {}, [[]], [{}], {"": None}, {"a": 1}, [1, 2], ["a", None], {"name": None}, {"name": "a"}, {"role": "user"}),
]
"""Values of every kind, ordinary ones and those at the edges."""


def broken_text(text: str, rng: random.Random) -> str:
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


def broken_bytes(content: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, put in or cut out."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(changed) + 1)
        change = rng.randrange(4)
        if change == 0 and place < len(changed):
            changed[place] = rng.randrange(256)
        elif change == 1:
            changed[place:place] = rng.randbytes(rng.choice((1, 2, 8)))
        elif change == 2:
            del changed[place : place + rng.choice((1, 4, 40))]
        elif rng.random() < 0.2:
            del changed[place:]
    return bytes(changed)


def broken_tree(tree: Any, rng: random.Random, names: Sequence[str] = (), leaves: Sequence[Any] = ()) -> Any:
    """A copy in which some nodes are replaced, removed, added, moved or nested. `names`: keys to add; `leaves`: values
    that would be right in some place, besides LEAVES."""
    tree = copied(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        places = list(places_in(tree))
        if not places:
            return rng.choice(LEAVES)
        around, key = rng.choice(places)
        change = rng.random()
        if change < 0.45:
            around[key] = any_value(rng, leaves)
        elif change < 0.55:
            del around[key]
        elif change < 0.65:
            around[key] = copied(rng.choice([outer[own] for outer, own in places]))
        elif change < 0.7:
            around[key] = nested(around[key], rng)
        elif change < 0.75 and isinstance(around[key], str):
            around[key] = broken_text(around[key], rng)
        elif isinstance(around, list):
            around.insert(rng.randrange(len(around) + 1), any_value(rng, leaves))
        else:
            around[rng.choice([*names, broken_text(key, rng), key])] = any_value(rng, leaves)
    return tree


def any_value(rng: random.Random, leaves: Sequence[Any] = ()) -> Any:
    return copied(rng.choice(leaves if leaves and rng.random() < 0.5 else LEAVES))


def copied(tree: Any) -> Any:
    """Of dates, which YAML has, their text; of what is nested too deeply, nothing."""
    try:
        return json.loads(json.dumps(tree, default=str))
    except RecursionError:
        return None


def nested(value: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 1, 2, 30, 600))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def places_in(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a tree, of at most some levels."""
    waiting = [tree]
    for _ in range(2000):
        if not waiting:
            return
        around = waiting.pop()
        keys = list(around) if isinstance(around, dict) else range(len(around)) if isinstance(around, list) else ()
        for key in keys:
            yield around, key
            waiting.append(around[key])


def broken_json(tree: Any, rng: random.Random, names: Sequence[str] = (), leaves: Sequence[Any] = ()) -> bytes:
    """A tree as JSON, broken as values, as text, as bytes, or as several of them."""
    if rng.random() < 0.8:
        tree = broken_tree(tree, rng, names, leaves)
    try:
        text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    except (ValueError, RecursionError):
        text = "[" * 3000
    if rng.random() < 0.15:
        text = broken_text(text, rng)
    content = text.encode("utf-8", rng.choice(("surrogatepass", "replace")))
    return broken_bytes(content, rng) if rng.random() < 0.1 else content
