"""The Python that agents of nodes start workers with, in tests (`forked_pythons.py`). An agent is a worker of Ray."""

import os
import sys

if any(argument.endswith("default_worker.py") for argument in sys.orig_argv):
    sys.executable = os.environ.get("CORRAL_TEST_PYTHON", sys.executable)
