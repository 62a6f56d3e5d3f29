"""Names of runs, which become those of folders."""

import re

from corral.migrate.table import Given, Outcome, Reading, converted, mapped


def run_name(reading: Reading, given: Given) -> Outcome:
    name = re.sub(r"[^\w.+=,-]+", "-", given.value or "").strip("-.+=,")
    if not name:
        raise ValueError("should name the run")
    return mapped("name", name) if name == given.value else converted({"name": name}, f"`{given.value}` as a folder")
