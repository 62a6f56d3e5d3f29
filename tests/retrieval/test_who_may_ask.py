"""Who asks a server what: connections that send nothing, for which nobody needs a token, keep no one else out, and
pages in a browser of this machine get no answer."""

import asyncio
import contextlib
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from deadlines import within
from fastapi import FastAPI, Request

from corral import http_server
from corral.envs import chat_endpoint
from corral.envs.chat_endpoint import ChatEndpoint, ChatSession
from corral.http_server import RequestRefused, listen, make_server, protect, read_body


@contextlib.contextmanager
def served(
    max_connections: int, token: str | None = "secret-token", hello: Callable[[], str] = lambda: "hello"
) -> Iterator[int]:
    app = FastAPI()
    app.get("/hello")(hello)
    protect(app, token)
    server, listening = make_server(app, max_connections), listen("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(within(10))


def ask(port: int) -> str:
    headers = {"Authorization": "Bearer secret-token"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/hello", headers=headers)
    with urllib.request.urlopen(request, timeout=within(10)) as answer:
        return str(json.load(answer))


def is_closed_within(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1000) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_silent_connections_do_not_lock_a_server_up() -> None:
    with served(max_connections=20) as port, contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        time.sleep(0.5)
        assert [ask(port) for _ in range(5)] == ["hello"] * 5


def test_the_peer_with_the_most_silent_connections_pays_for_them() -> None:
    with served(max_connections=20) as port, contextlib.ExitStack() as stack:
        alone = stack.enter_context(socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)))
        crowd = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]
        assert is_closed_within(crowd[0], within(10))
        assert not is_closed_within(alone, 1)


@pytest.mark.parametrize("sent", [b"", b"GET /hello HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_request_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.5)
    monkeypatch.setattr(http_server, "CHECK_S", 0.2)
    with served(max_connections=20) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(sent)
        assert is_closed_within(connection, within(10))


def test_a_connection_without_the_token_is_closed_after_its_answer() -> None:
    with served(max_connections=20) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
        connection.settimeout(within(10))
        answer = b""
        while chunk := connection.recv(1000):
            answer += chunk
        assert answer.startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:{}", 200), ("127.0.0.1:{}", 200), ("[::1]:{}", 200), ("pages.example:{}", 403), ("[", 403), ("", 403)],
)
def test_a_name_that_stands_for_loopback_gets_no_answer(host: str, status: int) -> None:
    with served(max_connections=20, token=None) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"GET /hello HTTP/1.1\r\nHost: {host.format(port)}\r\nConnection: close\r\n\r\n".encode())
        connection.settimeout(within(10))
        assert connection.recv(1000).startswith(f"HTTP/1.1 {status}".encode())


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Origin: http://evil.example", 403),
        ("Sec-Fetch-Site: cross-site", 403),
        ("Sec-Fetch-Site: same-site", 403),
        ("Origin: http://localhost:{}", 405),
        ("Accept: */*", 405),
    ],
)
def test_a_page_of_another_server_gets_no_answer(header: str, status: int) -> None:
    """405: it got as far as the routes, which take no POST."""
    with served(max_connections=20, token=None) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST /hello HTTP/1.1\r\nHost: localhost:{port}\r\n{header.format(port)}\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        connection.settimeout(within(10))
        assert connection.recv(1000).startswith(f"HTTP/1.1 {status}".encode())


def test_a_client_that_hangs_up_within_its_body_is_no_error() -> None:
    async def hang_up() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with pytest.raises(RequestRefused, match="hung up") as refused:
        asyncio.run(read_body(Request({"type": "http", "method": "POST", "headers": []}, hang_up), 100))
    assert refused.value.status == 499


@pytest.mark.deadline("a request must arrive within 0.2 s")
def test_an_answer_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.2)
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr(http_server, "CHECK_S", 0.1)
    with served(max_connections=10, hello=lambda: time.sleep(1.5) or "late") as port:
        assert ask(port) == "late"


@pytest.mark.deadline("a request must arrive within 0.5 s")
def test_silent_connections_do_not_lock_the_agents_endpoint_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "MAX_SILENT", 10)
    monkeypatch.setattr(chat_endpoint, "REQUEST_S", 0.5)
    endpoint = ChatEndpoint("m")
    try:
        session = ChatSession(endpoint, lambda pending: None)
        with contextlib.ExitStack() as stack:
            connections = [
                stack.enter_context(socket.create_connection(("127.0.0.1", endpoint.port))) for _ in range(12)
            ]
            assert is_closed_within(connections[0], within(10))  # the oldest, since there are too many
            assert is_closed_within(connections[-1], within(10))  # too late
            request = urllib.request.Request(
                f"{endpoint.base_url}/models", headers={"Authorization": f"Bearer {session.key}"}
            )
            with urllib.request.urlopen(request, timeout=within(10)) as answer:
                assert json.load(answer)["data"][0]["id"] == "m"
    finally:
        endpoint.close()
