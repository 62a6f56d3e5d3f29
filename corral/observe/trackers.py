"""The trackers that a recipe names, beside `metrics.jsonl`.

Numbers must never cost a run. Each tracker lives in a thread of its own, from start to close, so one that fails, hangs
or waits for a network loses its own rows and nothing else: the first loss is a warning, the rest are counted. Only a
tracker that cannot start ends a new run, before anything was computed.

An adapter (TensorBoard, WandB, MLflow, SwanLab, Trackio) starts a run, or continues the one in `saved`, and imports its
library only then. Accounts, servers and offline modes are what the user configured for that library; nothing of it is
in the recipe. After a resume, the steps since the checkpoint are logged a second time.
"""

import json
import logging
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import Any

from corral.observe.metric_names import verl_names
from corral.observe.prometheus import PrometheusServer
from corral.observe.run_files import MetricsFile, StepSamples, Tracker, TrackerFailures, Trackers
from corral.observe.run_folder import RunFolder
from corral.recipe.errors import UserError, install_command, pip_install
from corral.recipe.schema import Logging

logger = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
CLOSE_DEADLINE_S = 60.0
MAX_WAITING_ROWS = 10_000
MAX_WAITING_SAMPLES = 50
"""Rows that may wait where samples are added to them: those of a step may be megabytes."""
NUM_BINS = 64


def make_trackers(
    recipe: Logging,
    folder: RunFolder,
    run_name: str,
    saved_state: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    console: Tracker | None = None,
) -> Trackers:
    """Starts what `recipe.trackers` names; `saved_state` is the `state()` of the run that is resumed. `config`: the
    recipe as a plain mapping, for trackers that show it. `console` gets the numbers too if the recipe names it."""
    check_trackers(recipe)
    saved_state = saved_state or {}
    failures = TrackerFailures()
    trackers: dict[str, Tracker] = {"metrics.jsonl": MetricsFile(folder.metrics)}
    if recipe.prometheus is not None:  # first: where its port is taken, no other tracker has made a run yet
        trackers["prometheus"] = PrometheusServer(recipe.prometheus, run_name)
    for name in recipe.trackers:
        if name == "console":
            if console is not None:
                trackers[name] = console
            continue
        saved = saved_state.get(name, {})
        start = partial(ADAPTERS[name], folder.logs, recipe.project, run_name, config or {}, saved)
        try:
            started = TrackerThread(name, start, failures)
            trackers[name] = started if recipe.names == "corral" else VerlNames(started)
        except Exception as error:
            if not saved:
                for earlier in trackers.values():
                    earlier.close()
                raise UserError(
                    f"the tracker {name} could not start ({error}). Set it up, or take it out of `logging.trackers`"
                ) from error
            logger.warning("the tracker %s could not start (%s); the run goes on without it", name, error)
    return Trackers(trackers, saved_state, failures)


def check_trackers(recipe: Logging) -> None:
    """Raises where a tracker is not installed; imports none."""
    for name in recipe.trackers:
        if name != "console" and find_spec(name) is None:
            raise UserError(f"`logging.trackers` names {name}, which is not installed: {install_command(name)}")


class VerlNames(Tracker):
    """A tracker that gets metrics under the names of verl, where they have one."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker, self.shows_samples = tracker, tracker.shows_samples
        self.log_samples, self.close, self.state = tracker.log_samples, tracker.close, tracker.state  # type: ignore[method-assign]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tracker.log(step, verl_names(metrics))


class TrackerThread(Tracker):
    """A tracker and the thread it lives in.

    The thread consumes rows from a queue and waits for nothing else; None in the queue means close. The constructor
    waits for the tracker's start, `close` for the rows that are left, both with a deadline: a thread that does not
    return in time is abandoned (it is a daemon, and does not keep the process alive).
    """

    def __init__(self, name: str, start: Callable[[], Tracker], failures: TrackerFailures) -> None:
        self._name = name
        self._failures = failures
        self._rows: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        started: Future[Tracker] = Future()
        self._thread = threading.Thread(target=self._run, args=(start, started), name=f"tracker {name}", daemon=True)
        self._thread.start()
        try:
            error = started.exception(START_DEADLINE_S)
        except TimeoutError:
            raise UserError(f"no answer within {START_DEADLINE_S:.0f} s") from None
        if error is not None:
            raise error
        self._tracker = started.result()
        self.shows_samples = self._tracker.shows_samples

    def _run(self, start: Callable[[], Tracker], started: "Future[Tracker]") -> None:
        try:
            tracker = start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(tracker)
        while (pass_row := self._rows.get()) is not None:
            with self._failures.counted(self._name):
                pass_row(tracker)
        with self._failures.counted(self._name):
            tracker.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = dict(metrics)
        self._put(lambda tracker: tracker.log(step, row))

    def log_samples(self, step: int, samples: StepSamples) -> None:
        if self.shows_samples and self._rows.qsize() < MAX_WAITING_SAMPLES:
            self._put(lambda tracker: tracker.log_samples(step, samples))

    def _put(self, pass_row: Callable[[Tracker], None]) -> None:
        if self._rows.qsize() >= MAX_WAITING_ROWS:
            raise OverflowError(f"{MAX_WAITING_ROWS} rows are waiting for it")
        self._rows.put(pass_row)

    def close(self) -> None:
        self._rows.put(None)
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"it did not finish within {CLOSE_DEADLINE_S:.0f} s")

    def state(self) -> dict[str, str]:
        return self._tracker.state()


class TrackerAdapter(Tracker):
    """Logs to `self._run`, the run object of a library; adapters whose library is called otherwise override methods."""

    _run: Any

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoard(TrackerAdapter):
    """Event files in `logs/tensorboard`, written with neither torch nor TensorFlow."""

    shows_samples = True

    def __init__(self, logs: Path, project: str, run: str, config: Mapping[str, Any], saved: Mapping[str, str]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer, self._config = EventFileWriter(str(logs / "tensorboard")), config
        self._is_first_row = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        now = time.time()
        if self._is_first_row:
            # Makes TensorBoard drop what an earlier, killed process logged from this step on.
            session = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=now, step=step, session_log=session))
            self._is_first_row = False
            self._add(step, self._recipe())
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, Summary(value=values))
        self._writer.flush()

    def _recipe(self) -> Any:
        """The recipe as TensorBoard's page of hyperparameters has it, so that runs can be compared by it."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        keys = {key: value for key, value in flat(self._config) if value is not None}
        is_plain = {key: isinstance(value, bool | int | float | str) for key, value in keys.items()}
        return hparams_pb({key: value if is_plain[key] else str(value) for key, value in keys.items()})

    def log_samples(self, step: int, samples: StepSamples) -> None:
        import numpy as np
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb
        from tensorboard.plugins.text.summary_v2 import text_pb

        for name, values in samples.histograms.items():
            self._add(step, histogram_pb(f"histogram/{name}", np.asarray(values)))
        # Cells are Markdown: what is indented is shown as it is.
        cells = [[indent(str(cell), "    ", lambda _: True) for cell in row] for row in samples.rows]
        if cells:
            self._add(step, text_pb("trajectories", np.array([list(samples.columns), *cells], dtype=object)))
        self._writer.flush()

    def _add(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandB(TrackerAdapter):
    shows_samples = True

    def __init__(self, logs: Path, project: str, run: str, config: Mapping[str, Any], saved: Mapping[str, str]) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=run,
            dir=str(logs),
            id=saved.get("id"),
            resume="allow" if saved else None,
            config=dict(config),
            settings=wandb.Settings(console="off"),  # it would catch every redraw of the progress bar
        )
        # wandb's own step only grows, and would drop the steps that are logged again after a resume.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_samples(self, step: int, samples: StepSamples) -> None:
        import wandb

        self._run.log({"step": step, **media(samples, wandb)})

    def state(self) -> dict[str, str]:
        return {"id": self._run.id}


class MLflow(TrackerAdapter):
    """Through a client of its own, so that the user's active run and tracking address stay as they are."""

    shows_samples = True
    MAX_PARAMS_PER_CALL = 100
    MAX_PARAM_CHARACTERS = 500
    MAX_TABLES = 50
    """Number of files that the page of a run shows as tables: the tag that names them has a limit."""

    def __init__(self, logs: Path, project: str, run: str, config: Mapping[str, Any], saved: Mapping[str, str]) -> None:
        import mlflow
        from mlflow.tracking import MlflowClient

        if not mlflow.is_tracking_uri_set() and find_spec("sqlalchemy") is None:
            raise UserError(f"MLFLOW_TRACKING_URI names no server; for a local database, `{pip_install('mlflow')}`")
        self._client = MlflowClient()
        if saved:
            self._run_id = saved["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            experiment = self._client.get_experiment_by_name(project)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project)
            self._run_id = self._client.create_run(experiment_id, run_name=run).info.run_id
            self._log_params(config)

    def _log_params(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(_mlflow_name(key), str(value)[: self.MAX_PARAM_CHARACTERS]) for key, value in flat(config)]
        for start in range(0, len(params), self.MAX_PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + self.MAX_PARAMS_PER_CALL])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        rows = [Metric(_mlflow_name(name), float(value), now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def log_samples(self, step: int, samples: StepSamples) -> None:
        """A table is a file of the run, as `mlflow.log_table` writes it; that itself would need pandas, and reads the
        whole file to add a row. MLflow has no histograms."""
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        if not samples.rows:
            return
        path = f"trajectories/step_{step:06d}.json"
        content = {"columns": list(samples.columns), "data": [list(row) for row in samples.rows]}
        self._client.log_dict(self._run_id, content, path)
        tags = self._client.get_run(self._run_id).data.tags
        known = [one for one in json.loads(tags.get(MLFLOW_LOGGED_ARTIFACTS, "[]")) if one["path"] != path]
        shown = [*known, {"path": path, "type": "table"}][-self.MAX_TABLES :]
        self._client.set_tag(self._run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(shown))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def state(self) -> dict[str, str]:
        return {"run_id": self._run_id}


class SwanLab(TrackerAdapter):
    shows_samples = True

    def __init__(self, logs: Path, project: str, run: str, config: Mapping[str, Any], saved: Mapping[str, str]) -> None:
        import swanlab

        self._id = saved.get("id") or secrets.token_hex(11)[:21]  # its ids have 21 characters
        self._run = swanlab.init(
            project=project,
            experiment_name=run,
            logdir=str(logs / "swanlab"),
            id=self._id,
            resume="allow",
            config=dict(config),
        )

    def log_samples(self, step: int, samples: StepSamples) -> None:
        """SwanLab has texts, one beside the other, and neither tables nor histograms."""
        import swanlab

        texts = [
            "\n".join(f"{name}: {cell}" for name, cell in zip(samples.columns, row, strict=True))
            for row in samples.rows
        ]
        if texts:
            self._run.log({"trajectories": [swanlab.Text(text) for text in texts]}, step=step)

    def state(self) -> dict[str, str]:
        return {"id": self._id}


class Trackio(TrackerAdapter):
    """Identifies a run by its name within the project."""

    shows_samples = True

    def __init__(self, logs: Path, project: str, run: str, config: Mapping[str, Any], saved: Mapping[str, str]) -> None:
        import trackio

        name, resume = saved.get("name", run), "allow" if saved else "never"
        self._run = trackio.init(project=project, name=name, resume=resume, config=dict(config), embed=False)

    def log_samples(self, step: int, samples: StepSamples) -> None:
        import trackio

        self._run.log(media(samples, trackio), step=step)

    def state(self) -> dict[str, str]:
        return {"name": self._run.name}


ADAPTERS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "swanlab": SwanLab,
    "trackio": Trackio,
}


def media(samples: StepSamples, library: Any) -> dict[str, Any]:
    """Tables and histograms of wandb, or of trackio, which has the same."""
    import numpy as np

    found = {
        f"histogram/{name}": library.Histogram(np_histogram=np.histogram(np.asarray(values), bins=NUM_BINS))
        for name, values in samples.histograms.items()
    }
    if samples.rows:
        found["trajectories"] = library.Table(columns=list(samples.columns), data=[list(row) for row in samples.rows])
    return found


def _mlflow_name(name: str) -> str:
    """Few characters are allowed in a name: validation/pass@8 becomes validation/pass_at_8."""
    return re.sub(r"[^\w/. -]", "_", name.replace("@", "_at_"))


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of a recipe by their dotted keys."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
