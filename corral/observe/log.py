"""The program's own log: everything to `logs/main.log`, Corral's warnings to the console too.

What libraries have to say (transformers, httpx, Python's `warnings`) is in the file, and not on the console.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from corral.observe.console import Console


@contextmanager
def run_log(path: Path, console: Console) -> Iterator[None]:
    """For the time of the block. Corral's modules log with `logging.getLogger(__name__)` and know nothing of this."""
    root, ours = logging.getLogger(), logging.getLogger("corral")
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    to_file.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S%z")
    )
    to_console = _ToConsole(console)
    level = ours.level
    quiet_libraries()
    root.addHandler(to_file)
    ours.addHandler(to_console)
    ours.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        ours.setLevel(level)
        ours.removeHandler(to_console)
        root.removeHandler(to_file)
        to_file.close()


def quiet_libraries() -> None:
    """Sends the records of every library that was imported so far to the root logger instead of the terminal.

    Some set up a handler of their own when they are imported (transformers does), so this is to be called again after
    an import in the middle of a run.
    """
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in [logging.root, *loggers]:
        for handler in [handler for handler in logger.handlers if _writes_to_terminal(handler)]:
            logger.removeHandler(handler)
            logger.propagate = True
    transformers = sys.modules.get("transformers.utils.logging")
    if transformers is not None:
        transformers.disable_progress_bar()


def _writes_to_terminal(handler: logging.Handler) -> bool:
    if not isinstance(handler, logging.StreamHandler) or isinstance(handler, logging.FileHandler):
        return False
    return handler.stream in (sys.stdout, sys.stderr) or getattr(handler.stream, "name", "") in ("<stdout>", "<stderr>")


class _ToConsole(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.warn(record.getMessage())
