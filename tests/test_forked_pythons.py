"""The server that the tests' processes are forked by."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import forked_pythons
import pytest
from deadlines import within
from forked_pythons import FORKED, ForkedProcess


def test_a_client_that_leaves_before_it_has_asked_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRAL_TEST_PYTHON", "")  # set by `prepare`
    monkeypatch.setattr(forked_pythons, "REPLY_S", within(20))
    with forked_pythons.prepare() as listener:
        address, folder = listener.getsockname(), str(Path(forked_pythons.__file__).parent)
        serve = f"import socket, forked_pythons as f; f.serve(socket.socket(fileno={listener.fileno()}), True)"
        pipe, descriptors = subprocess.PIPE, [listener.fileno()]
        server = subprocess.Popen([sys.executable, "-c", serve], cwd=folder, stdin=pipe, pass_fds=descriptors)
    try:
        for message in (b"", json.dumps({"arguments": []}).encode()):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(address)
                client.sendall(message)
        with open(os.devnull) as null:
            process = ForkedProcess(address, ["-c", FORKED], [null.fileno()] * 3, folder=folder, path=sys.path)
        process.join(within(20))
        assert process.exitcode == 0
    finally:
        server.kill()
        server.communicate()
