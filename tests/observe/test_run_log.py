import io
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from deadlines import within

from corral.observe.console import Console, run_log


def test_our_warnings_are_on_the_console_and_in_the_file(tmp_path: Path) -> None:
    stream = io.StringIO()
    with run_log(tmp_path / "logs" / "main.log", Console(stream)):
        logging.getLogger("corral.loop").warning("only %d left", 3)
    assert stream.getvalue() == "warning: only 3 left\n"
    assert "WARNING corral.loop: only 3 left" in (tmp_path / "logs" / "main.log").read_text()


def test_what_is_only_worth_knowing_is_in_the_file(tmp_path: Path) -> None:
    stream = io.StringIO()
    with run_log(tmp_path / "main.log", Console(stream)):
        logging.getLogger("corral.loop").info("step 3 done")
    assert stream.getvalue() == ""
    assert "INFO corral.loop: step 3 done" in (tmp_path / "main.log").read_text()


def test_a_resumed_run_adds_to_the_log(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with run_log(tmp_path / "main.log", Console(io.StringIO())):
            logging.getLogger("corral").info(text)
    assert len((tmp_path / "main.log").read_text().splitlines()) == 2


def test_libraries_are_kept_out_of_the_console(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("noisy_library")
    library.addHandler(logging.StreamHandler(sys.stderr))  # as transformers does when it is imported
    library.propagate = False
    stream = io.StringIO()
    with run_log(tmp_path / "main.log", Console(stream)):
        logging.getLogger("noisy_library.models").warning("some weights were not used")
        warnings.warn("deprecated", stacklevel=1)
    assert stream.getvalue() == ""
    assert capfd.readouterr().err == ""
    text = (tmp_path / "main.log").read_text()
    assert "noisy_library.models: some weights were not used" in text
    assert "deprecated" in text


@pytest.mark.slow
def test_the_real_transformers_is_quiet_too(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    program = """
import sys
from pathlib import Path
from transformers.utils import logging
from corral.observe.console import Console
from corral.observe.console import run_log
with run_log(Path(sys.argv[1]), Console()):
    logging.get_logger("transformers.modeling_utils").warning("some weights were not used")
"""
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "main.log")], capture_output=True, check=True, timeout=within(60)
    )
    assert result.stdout + result.stderr == b""
    assert "some weights were not used" in (tmp_path / "main.log").read_text()


def test_the_logging_of_the_process_is_as_before_when_the_run_is_over(tmp_path: Path) -> None:
    handlers, level = list(logging.root.handlers), logging.getLogger("corral").level
    with run_log(tmp_path / "main.log", Console(io.StringIO())):
        pass
    assert (logging.root.handlers, logging.getLogger("corral").level) == (handlers, level)


def test_a_log_on_a_full_disk_is_one_warning_and_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with run_log(Path("/dev/full"), Console(stream)):
        for number in range(3):
            logging.getLogger("corral.loop").info("line %d", number)
    assert stream.getvalue() == "warning: /dev/full cannot be written: No space left on device\n"
    assert capfd.readouterr().err == ""
