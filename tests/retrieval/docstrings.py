"""A real corpus that is on every machine: what Python's own library says of itself."""

import importlib
import inspect
import json
from functools import cache
from pathlib import Path

MODULES = (
    "argparse", "ast", "asyncio", "bisect", "calendar", "collections", "configparser", "contextlib", "csv", "datetime",
    "decimal", "difflib", "email", "fractions", "functools", "glob", "hashlib", "heapq", "html", "http.client",
    "inspect", "ipaddress", "itertools", "json", "logging", "math", "mimetypes", "os", "os.path", "pathlib", "pickle",
    "queue", "random", "re", "sched", "shutil", "socket", "sqlite3", "statistics", "string", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "time", "turtle", "unittest", "urllib.parse", "uuid", "weakref", "zipfile",
)  # fmt: skip

QUERIES = [
    "find the median of numbers",
    "parse command line arguments",
    "insert into a sorted list",
    "largest common divisor of two integers",
    "temporary directory that is removed",
    "matching sequences of text, differences",
    "read rows of a comma separated file",
    "priority queue heap",
]


@cache
def docstrings() -> tuple[tuple[str, str], ...]:
    """Titles and texts, the same in every run."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for member, value in sorted(vars(module).items()):
            text = inspect.getdoc(value) if inspect.isroutine(value) or inspect.isclass(value) else None
            if text and not member.startswith("_"):
                found.setdefault(f"{name}.{member}", text)
    return tuple(found.items())


def write_corpus(path: Path, number: int = 400, length: int = 600) -> Path:
    """Every other passage in the one form, every other in the other."""
    chosen = docstrings()[:: max(1, len(docstrings()) // number)][:number]
    with path.open("w") as file:
        for row, (title, text) in enumerate(chosen):
            text = text[:length]
            form = {"title": title, "text": text} if row % 2 else {"contents": f'"{title}"\n{text}'}
            file.write(json.dumps({"id": f"doc{row}", **form}) + "\n")
    return path


def contents(path: Path) -> list[str]:
    """Read without the code under test."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [one.get("contents") or f'"{one["title"]}"\n{one["text"]}' for one in records]
