"""The least of a debugger client that speaks the Debug Adapter Protocol, as an editor does."""

import json
import socket
from typing import Any, Self

from deadlines import within

TIMEOUT_S = within(30)


class DebugClient:
    """Connected to a program that waits for it; `stopped` is where that is then."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self.file = self.socket.makefile("rb")
        self.number = 0
        self.events: list[dict[str, Any]] = []
        self.request("initialize", adapterID="test")
        attaching = self._send("attach", {"name": "test"})
        self._until(lambda message: message.get("event") == "initialized")
        self.request("setExceptionBreakpoints", filters=["uncaught", "userUnhandled"])
        self.request("configurationDone")
        self._answer(attaching)
        self.stopped = self._until(lambda message: message.get("event") == "stopped")["body"]

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self._answer(self._send(command, arguments))

    def frames(self) -> list[dict[str, Any]]:
        """Innermost first."""
        return self.request("stackTrace", threadId=self.stopped["threadId"])["stackFrames"]

    def evaluate(self, expression: str, frame: int) -> str:
        return self.request("evaluate", expression=expression, frameId=frame)["result"]

    def close(self) -> None:
        """The program goes on."""
        self.request("disconnect", terminateDebuggee=False)
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, command: str, arguments: dict[str, Any]) -> int:
        self.number += 1
        message = {"seq": self.number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return self.number

    def _answer(self, number: int) -> dict[str, Any]:
        message = self._until(lambda message: message.get("request_seq") == number)
        assert message["success"], message
        return message.get("body", {})

    def _until(self, wanted: Any) -> dict[str, Any]:
        for position, message in enumerate(self.events):
            if wanted(message):
                return self.events.pop(position)
        while True:
            message = self._read()
            if wanted(message):
                return message
            self.events.append(message)

    def _read(self) -> dict[str, Any]:
        length = 0
        while line := self.file.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        assert length, "the program has closed the connection"
        return json.loads(self.file.read(length))
