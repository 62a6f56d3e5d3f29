"""Configurations of other systems, read for tests."""

from pathlib import Path

from corral.migrate.config import RawConfig, add_file, add_override
from corral.migrate.migration import Migration, migrate
from corral.migrate.table import KeyTable


def read(table: KeyTable, *overrides: str, file: Path | None = None) -> Migration:
    """A file with changes to it, or changes alone; missing files of `defaults` are done without."""
    config = RawConfig()
    if file is not None:
        add_file(config, file)
    for override in overrides:
        add_override(config, override, "test")
    return migrate(table, config.flat(), problems=config.problems)
