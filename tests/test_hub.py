"""Where models and data come from: ModelScope's own client against a server with its wire, and hubs out of reach."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import huggingface_hub
import pytest
from deadlines import within
from served import free_port
from tiny import save_tiny_model

from corral import hub
from corral.data.sources import read_hub
from corral.model.model_loading import model_source
from corral.recipe.errors import UserError
from corral.recipe.schema import Source
from corral.recipe.shape import ModelShape

NAME, DATA = "ms:org/tiny-1.0", "ms:org/sums"


@pytest.fixture
def far_hub(monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of a hub at which nobody listens, as Hugging Face's."""
    endpoint = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return endpoint


@pytest.mark.deadline("the hub's own client tries for 23 s")
def test_a_hub_that_cannot_be_reached_is_an_error_within_seconds_and_says_what_else_to_do(far_hub: str) -> None:
    pytest.importorskip("datasets")
    begin = time.monotonic()
    for ask in (lambda: model_source("org/model"), lambda: list(read_hub("org/data", None, None))):
        with pytest.raises(UserError, match=rf"{far_hub} cannot be reached .*HF_ENDPOINT.*ms:.*HF_HUB_OFFLINE"):
            ask()
    assert time.monotonic() - begin < within(4)


def test_an_endpoint_that_is_no_address_is_a_problem_of_its_own() -> None:
    assert hub.unreachable("hub.example") == "hub.example cannot be reached (unknown url type: 'hub.example')"


def test_a_hub_that_takes_connections_and_answers_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "REACHED_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert hub.unreachable(f"http://127.0.0.1:{silent.getsockname()[1]}") is not None


def test_what_is_in_the_cache_is_used_where_its_hub_cannot_be_reached(
    far_hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert model_source("org/name") == str(snapshot)


# --- ModelScope


def test_names_on_modelscope_are_told_from_files_and_functions() -> None:
    assert Source(path=DATA).hub_name == DATA
    with pytest.raises(UserError, match=r"critic.path: ms:nothing is no name on ModelScope"):
        model_source("ms:nothing", "critic.path")


@pytest.mark.skipif(find_spec("modelscope") is not None, reason="the package is there")
def test_without_its_package_a_name_on_modelscope_names_the_extra() -> None:
    for ask in (lambda: model_source(NAME), lambda: list(read_hub(DATA, None, None))):
        with pytest.raises(UserError, match="pip install modelscope"):
            ask()


class ModelScopeServer:
    """Answers what ModelScope's client asks for when it downloads a repository: its list of files, and each of them."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        """`repositories`: folders by `models/owner/name` or `datasets/owner/name`."""
        self.repositories = repositories
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                asked.append(self.path)
                _, _, name = url.path.partition("/api/v1/")
                for repository, folder in repositories.items():
                    if name in (f"{repository}/repo/files", f"{repository}/repo/tree"):
                        files = [listed(file, folder) for file in sorted(folder.iterdir())]
                        body = {"Code": 200, "Success": True, "Data": {"Files": files, "TotalCount": len(files)}}
                        return self.answer(200, json.dumps(body).encode())
                    if name == f"{repository}/repo":
                        return self.answer(200, (folder / parse_qs(url.query)["FilePath"][0]).read_bytes())
                return self.answer(404, b"{}")

            def do_HEAD(self) -> None:
                self.answer(200, b"")

            def answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def downloads(self) -> list[str]:
        return [path for path in self.asked if "FilePath" in path]


def listed(file: Path, folder: Path) -> dict[str, Any]:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"Path": str(file.relative_to(folder)), "Name": file.name, "Type": "blob", "Size": file.stat().st_size} | {
        "Sha256": digest,
        "Revision": "master",
    }


@pytest.fixture(scope="module")
def modelscope(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelScopeServer]:
    pytest.importorskip("modelscope", reason="ModelScope's package")
    folder = tmp_path_factory.mktemp("modelscope")
    save_tiny_model(folder / "model")
    (folder / "model" / "model.gguf").write_text("of no use here")
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    server = ModelScopeServer({"models/org/tiny-1.0": folder / "model", "datasets/org/sums": folder / "rows"})
    values = {"ENDPOINT": server.endpoint, "CACHE": str(folder / "cache"), "HOME": str(folder)}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in values.items():
            monkeypatch.setenv(f"MODELSCOPE_{name}", value)
        yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def forgetful() -> Iterator[None]:
    """A process that has not downloaded anything yet, nor one after this."""
    hub.modelscope_folder.cache_clear()
    yield
    hub.modelscope_folder.cache_clear()


@pytest.mark.usefixtures("forgetful")
def test_a_model_on_modelscope_is_downloaded_once_and_known_to_plans(
    modelscope: ModelScopeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = modelscope.repositories["models/org/tiny-1.0"]
    assert ModelShape.find(NAME) is None
    folder = Path(model_source(NAME))
    assert (folder / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    assert not (folder / "model.gguf").exists()
    assert ModelShape.find(NAME) == ModelShape.from_folder(original)
    downloads = modelscope.downloads()
    hub.modelscope_folder.cache_clear()
    assert Path(model_source(NAME)) == folder
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    hub.modelscope_folder.cache_clear()
    assert Path(model_source(NAME)) == folder  # out of reach, and in the cache
    assert modelscope.downloads() == downloads
    with pytest.raises(UserError, match=r"cannot be reached .*MODELSCOPE_ENDPOINT"):
        model_source("ms:org/other")


@pytest.mark.usefixtures("modelscope", "forgetful")
def test_rows_of_a_data_set_on_modelscope_are_read() -> None:
    pytest.importorskip("datasets")
    assert [row for _, row in read_hub(DATA, None, "train")] == [{"prompt": "1 + 1 =", "answer": "2"}]


@pytest.mark.slow
@pytest.mark.usefixtures("modelscope")
def test_a_recipe_trains_a_model_and_rows_of_modelscope(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: tiny\nmodel: {{path: '{NAME}'}}\n"
        f"data: {{train: {{path: '{DATA}', split: train}}, chat: false, max_prompt_tokens: 32}}\n"
        "environment: {reward: {name: exact}}\nrollout: {max_response_tokens: 4}\n"
        "batch: {prompts_per_step: 1, samples_per_prompt: 2}\nschedule: {steps: 1}\n"
        f"logging: {{runs: '{tmp_path / 'runs'}'}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "corral.cli.main", "train", str(recipe)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
