"""Asking a retriever over HTTP, and a search service of the tests' own."""

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from commands import Command, start_corral
from deadlines import within


@dataclass(frozen=True)
class Reply:
    status: int
    text: str
    headers: Message

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True)
class Served:
    command: Command
    url: str

    def ask(self, path: str, body: Any = None, token: str | None = None) -> Reply:
        """A POST if there is a body: bytes as they are, other things as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=within(30)) as answer:
                return Reply(answer.status, answer.read().decode(), answer.headers)
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.read().decode(), error.headers)

    def metric(self, name: str) -> float:
        found = re.search(rf"^corral_retriever_{re.escape(name)} (.+)$", self.ask("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0


@contextmanager
def serving(folder: Path, *options: str, ready: bool = True, before: Any = None) -> Iterator[Served]:
    """`corral retriever serve OPTIONS` on any free port."""
    command = start_corral(folder, "retriever", "serve", *options, "--port", "0", before=before)
    try:
        word = "ready" if ready else "listening"
        command.wait_until(lambda: word in command.stdout.read_text())
        said = re.search(r"listening on (http://\S+);", command.stdout.read_text())
        assert said, command.stderr.read_text()
        yield Served(command, said[1].replace("0.0.0.0", "127.0.0.1"))
    finally:
        if command.is_running():
            command.process.kill()
        command.process.join()


@dataclass
class Service:
    """Answers as a search API would, when it is let."""

    url: str = ""
    status: int = 200
    may_answer: threading.Event = field(default_factory=threading.Event)
    finds: bool = True
    """False: without a list of results."""
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)


@contextmanager
def search_service() -> Iterator[Service]:
    service = Service()
    service.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            service.requests.append((self.path, dict(self.headers), body))
            service.may_answer.wait(within(30))
            hits = [{"page": {"name": f"T{n}"}, "snippet": f"text {n}", "link": f"http://x/{n}"} for n in range(5)]
            answer = json.dumps({"web": {"results": hits}} if service.finds else {}).encode()
            self.send_response(service.status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield service
    finally:
        service.may_answer.set()
        server.shutdown()
        server.server_close()


def load_when_told() -> None:
    """For a process of the command line: the index is opened when a file named `go` is there."""

    from corral.retrieval import index

    opened = index.open_index

    def wait_and_open(*arguments: Any) -> Any:
        while not Path("go").exists():
            time.sleep(0.01)
        return opened(*arguments)

    index.open_index = wait_and_open
