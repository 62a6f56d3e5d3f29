"""The last metrics of a run over HTTP, in the text format of Prometheus (`logging.prometheus`).

A server in a thread of the controller, which answers `/metrics` and nothing else, as long as the run goes on. Each
metric is a gauge: `reward/mean` is `corral_reward_mean`. Two names that are one in Prometheus differ in the
label `metric`, which has Corral's name.
"""

import logging
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from corral.http_server import PrometheusText, check_installed, labels, listen, make_server, protect, read_token, url_of
from corral.observe.run_files import Tracker
from corral.recipe.schema import Prometheus

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 20
JOIN_S = 10.0


class PrometheusServer(Tracker):
    def __init__(self, settings: Prometheus, run: str) -> None:
        check_installed("logging.prometheus")
        token = None if settings.token_file is None else read_token(Path(settings.token_file).expanduser())
        self._run, self._lock = run, threading.Lock()
        self._values: dict[str, float] = {}
        self._step: int | None = None
        self._updated = time.time()
        self._listening = listen(settings.host, settings.port, "logging.prometheus")
        self.url = f"{url_of(settings.host, self._listening)}/metrics"
        self._server = make_server(make_app(self, token), MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._serve, name="prometheus", daemon=True)
        self._thread.start()
        logger.info("metrics for Prometheus are at %s", self.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._values.update(metrics)
            self._step, self._updated = step, time.time()

    def text(self) -> str:
        with self._lock:
            values, step, updated = dict(self._values), self._step, self._updated
        page, run = PrometheusText("corral"), labels(run=self._run)
        if step is not None:  # nothing was logged since the run began or was resumed
            page.add("run_step", "gauge", "Steps that the run has made.", {run: step})
        page.add("run_updated_timestamp_seconds", "gauge", "When the run last measured anything.", {run: updated})
        by_name: dict[str, dict[str, float]] = {}
        for name, value in sorted(values.items()):
            by_name.setdefault(prometheus_name(name), {})[labels(run=self._run, metric=name)] = value
        for name, own in by_name.items():
            page.add(name, "gauge", "A metric of the run, by its name in metrics.jsonl.", own)
        return page.text

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(JOIN_S)
        self._listening.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._listening])


def prometheus_name(name: str) -> str:
    """validation/mean@8 becomes validation_mean_at_8."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name.replace("@", "_at_"))


def make_app(server: PrometheusServer, token: str | None) -> "FastAPI":
    from fastapi import FastAPI, Response

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(server.text(), media_type="text/plain; version=0.0.4")

    protect(app, token)
    return app
