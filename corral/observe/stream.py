"""A text stream that output cannot break."""

from typing import IO, Any


class LastingStream:
    """Passes text on to `stream` for as long as there is someone to read it.

    A run must outlive its audience: when the reader of a pipe is gone or the terminal was closed, the text is dropped
    (rich would end the process). Signs that the stream's encoding does not have are written as `?`.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_broken = False

    def write(self, text: str) -> int:
        if not self._is_broken:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            try:
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
            except (OSError, ValueError):  # ValueError: it is closed
                self._is_broken = True
        return len(text)

    def flush(self) -> None:
        if not self._is_broken:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._is_broken = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
