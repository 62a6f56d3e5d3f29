"""Messages between the pool and its workers: length, then bytes, over a socket.

Requests are pickled (we send them to ourselves); replies are JSON, since what runs in a worker is not ours.
"""

import socket
import struct

_LENGTH = struct.Struct(">I")
_MOST_AT_ONCE = 1 << 20


def framed(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


class Inbox:
    """What arrives on a socket. Messages that arrive together are read with one call of the system."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._arrived = bytearray()

    def receive(self) -> bytes:
        """The next message. EOFError if the other side is gone; TimeoutError after the socket's timeout."""
        while not self.has_message:
            self.read()
        end = self._end
        message = bytes(self._arrived[_LENGTH.size : end])
        del self._arrived[:end]
        return message

    def read(self) -> None:
        """Waits for more of what is sent."""
        chunk = self._connection.recv(_MOST_AT_ONCE)
        if not chunk:
            raise EOFError
        self._arrived += chunk

    @property
    def has_message(self) -> bool:
        return len(self._arrived) >= _LENGTH.size and len(self._arrived) >= self._end

    @property
    def is_empty(self) -> bool:
        return not self._arrived

    @property
    def _end(self) -> int:
        (length,) = _LENGTH.unpack_from(self._arrived)
        return _LENGTH.size + int(length)
