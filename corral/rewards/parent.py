"""Programs that do not outlive the one who started them, however that ended. Linux only: elsewhere they may."""

import signal
import sys
from collections.abc import Sequence

_BECOME = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"
"""1: PR_SET_PDEATHSIG, which outlasts exec."""


def dying_with_parent(command: Sequence[str], number: signal.Signals) -> list[str]:
    """The command for a program that gets this signal when the thread which starts it ends."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(number.value), *command]
