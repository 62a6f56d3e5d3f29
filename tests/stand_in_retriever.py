"""A small HTTP server that speaks to retrieval clients and does what a test tells it."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], bytes] | None
"""None: the connection is closed instead."""


class StandInRetriever:
    """Finds for every query one document that repeats it, or what `answer` is made to say."""

    def __init__(self, port: int = 0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.authorisations: list[str | None] = []
        self.answer: Callable[[list[str]], Answer] = in_full
        self.delay_s = 0.0
        self.port = port
        self.start()

    def start(self) -> None:
        told = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if told.stopping or self.path != "/retrieve":
                    self.close_connection = True
                    return
                told.requests.append(body)
                told.authorisations.append(self.headers["Authorization"])
                time.sleep(told.delay_s)
                answer = told.answer(body["queries"])
                if answer is None:
                    self.close_connection = True
                    return
                status, headers, content = answer
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.stopping = False
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.http.daemon_threads = True
        self.http.block_on_close = False
        self.port = self.http.server_port
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.stopping = True
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def queries(self) -> list[str]:
        return [query for request in self.requests for query in request["queries"]]


def in_full(queries: list[str]) -> Answer:
    found = [[{"document": {"id": "7", "contents": f'"On {query}"\nAll of it.'}, "score": 2.5}] for query in queries]
    return 200, {}, json.dumps({"result": found}).encode()
