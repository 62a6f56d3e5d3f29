"""The process that runs a reward function: reads a request, calls the function, replies, until its socket closes.

It holds no state that matters and may be killed at any moment. Whatever the function prints goes to the run's stderr.
"""

import json
import os
import pickle
import socket
import sys
from typing import Any

from corral.child_process import die_with_parent
from corral.data.plugins import error_line
from corral.recipe.errors import UserError
from corral.rewards.calling import call, load_function
from corral.rewards.messages import Inbox, framed


def main(descriptor: int) -> None:
    """Serve the pool at the other end of the socket `descriptor`."""
    connection = connect(descriptor)
    inbox = Inbox(connection)
    try:
        name, options = pickle.loads(inbox.receive())
        try:
            function = load_function(name, options)
        except (UserError, SystemExit) as error:
            reply(connection, {"unusable": str(error)})
            return
        reply(connection, {"ready": True})
        while True:
            reply(connection, _score(function, inbox.receive(), options))
    except (EOFError, ConnectionError):
        return  # the pool is closed, or its process is gone


def connect(descriptor: int) -> socket.socket:
    """What a worker process does first: its socket, and how it ends."""
    die_with_parent()
    sys.breakpointhook = _no_terminal
    os.set_inheritable(descriptor, False)  # not for programs that the function starts
    return socket.socket(fileno=descriptor)


def reply(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(framed(json.dumps(message).encode()))


def _score(function: Any, request: bytes, options: dict[str, Any]) -> dict[str, Any]:
    try:
        response, row = pickle.loads(request)
        result = call(function, response, row, options)
    except BaseException as error:  # also SystemExit: the sample failed, the worker is well
        return {"error": error_line(error)}
    return {"score": result.score, "metrics": result.metrics}


def _no_terminal(*_: Any, **__: Any) -> None:
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        raise RuntimeError("code in a process of its own has no terminal for breakpoint(); `corral train --debug` has")
