"""Messages between the pool and its workers: length, then bytes, over a socket.

Requests are pickled (we send them to ourselves); replies are JSON, since what runs in a worker is not ours.
"""

import socket
import struct

_LENGTH = struct.Struct(">I")


def send_message(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_message(connection: socket.socket) -> bytes:
    """EOFError if the other side is gone; TimeoutError after the socket's timeout."""
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    return _receive(connection, length)


def _receive(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        chunk = connection.recv(min(length - len(received), 1 << 20))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)
