"""The trackers of others behind our seam: tensorboard, wandb, mlflow, swanlab, trackio.

Each adapter starts a run, or goes on with the one in `saved`, and imports its library only then. Accounts, servers and
offline modes are what the user configured for that library; nothing of it is in the recipe. After a resume, the steps
since the checkpoint are logged a second time.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.recipe.errors import UserError

if TYPE_CHECKING:
    from corral.observe.trackers import Tracker


class TensorBoard:
    """Event files in `logs/tensorboard`, written with neither torch nor TensorFlow."""

    def __init__(self, logs: Path, project: str, run: str, config: Mapping[str, Any], saved: Mapping[str, str]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(logs / "tensorboard"))
        self._is_first_row = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        now = time.time()
        if self._is_first_row:
            # Makes TensorBoard forget what an earlier, killed process logged from this step on.
            session = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=now, step=step, session_log=session))
            self._is_first_row = False
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def state(self) -> dict[str, str]:
        return {}


class WandB:
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

    def close(self) -> None:
        self._run.finish()

    def state(self) -> dict[str, str]:
        return {"id": self._run.id}


class MLflow:
    """Through a client of its own, so that the user's active run and tracking address stay as they are."""

    MAX_PARAMS_PER_CALL = 100
    MAX_PARAM_CHARACTERS = 500

    def __init__(self, logs: Path, project: str, run: str, config: Mapping[str, Any], saved: Mapping[str, str]) -> None:
        import mlflow
        from mlflow.tracking import MlflowClient

        if not mlflow.is_tracking_uri_set() and find_spec("sqlalchemy") is None:
            raise UserError("MLFLOW_TRACKING_URI names no server; for a local database, `pip install mlflow`")
        self._client = MlflowClient()
        if saved:
            self._run_id = saved["run_id"]
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            experiment = self._client.get_experiment_by_name(project)
            experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project)
            self._run_id = self._client.create_run(experiment_id, run_name=run).info.run_id
            self._log_params(dict(_flat(config)))

    def _log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        entities = [
            Param(_mlflow_name(name), str(value)[: self.MAX_PARAM_CHARACTERS]) for name, value in params.items()
        ]
        for start in range(0, len(entities), self.MAX_PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=entities[start : start + self.MAX_PARAMS_PER_CALL])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        rows = [Metric(_mlflow_name(name), float(value), now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def state(self) -> dict[str, str]:
        return {"run_id": self._run_id}


class SwanLab:
    def __init__(self, logs: Path, project: str, run: str, config: Mapping[str, Any], saved: Mapping[str, str]) -> None:
        import swanlab

        self._id = saved.get("id") or secrets.token_hex(11)[:21]  # it wants 21 characters
        self._run = swanlab.init(
            project=project,
            experiment_name=run,
            logdir=str(logs / "swanlab"),
            id=self._id,
            resume="allow",
            config=dict(config),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()

    def state(self) -> dict[str, str]:
        return {"id": self._id}


class Trackio:
    """Knows a run by its name within the project."""

    def __init__(self, logs: Path, project: str, run: str, config: Mapping[str, Any], saved: Mapping[str, str]) -> None:
        import trackio

        self._run = trackio.init(
            project=project,
            name=saved.get("name", run),
            resume="allow" if saved else "never",
            config=dict(config),
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()

    def state(self) -> dict[str, str]:
        return {"name": self._run.name}


ADAPTERS: dict[str, "Callable[..., Tracker]"] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "swanlab": SwanLab,
    "trackio": Trackio,
}


def _mlflow_name(name: str) -> str:
    """Few signs are allowed in one: validation/pass@8 becomes validation/pass_at_8."""
    return re.sub(r"[^\w/. -]", "_", name.replace("@", "_at_"))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
