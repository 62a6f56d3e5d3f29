"""Names of runs, which become those of folders."""

import re

from corral.migrate.table import ForeignConfig, ForeignValue, Outcome, converted, mapped


def run_name(config: ForeignConfig, given: ForeignValue) -> Outcome:
    name = re.sub(r"[^\w.+=,-]+", "-", given.value or "").strip("-.+=,")
    if not name:
        raise ValueError("should name the run")
    return mapped("name", name) if name == given.value else converted({"name": name}, f"`{given.value}` as a folder")
