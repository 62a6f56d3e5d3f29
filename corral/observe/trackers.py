"""Where a run's numbers go: `metrics.jsonl` always, and the trackers that the recipe names.

Numbers must never cost a run. Each tracker of `adapters.py` lives in a thread of its own, from start to close, so one
that fails, hangs or waits for a network loses its own rows and nothing else: the first loss is a warning, the rest are
counted. Only a tracker that cannot start ends a new run, before anything was computed.
"""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

from corral.observe.adapters import ADAPTERS
from corral.observe.metrics import MetricsFile
from corral.observe.run_folder import RunFolder
from corral.recipe.errors import UserError
from corral.recipe.schema import Logging

logger = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
CLOSE_DEADLINE_S = 60.0
MAX_WAITING_ROWS = 10_000


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...

    def state(self) -> dict[str, str]:
        """What a tracker of this kind needs to go on with the same run after a resume."""
        ...


class Trackers:
    """All trackers of a run as one tracker. `failures` counts, by tracker, what was lost."""

    def __init__(self, trackers: Mapping[str, Tracker], saved_state: Mapping[str, Any], failures: "Failures") -> None:
        self.failures = failures
        self._trackers = trackers
        self._saved_state = saved_state

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, tracker in self._trackers.items():
            try:
                tracker.log(step, metrics)
            except Exception as error:
                self.failures.report(name, error)

    def state(self) -> dict[str, dict[str, str]]:
        """By tracker. Of one that could not start this time, what was saved before."""
        states = {name: tracker.state() for name, tracker in self._trackers.items()}
        return {**self._saved_state, **{name: state for name, state in states.items() if state}}

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                self.failures.report(name, error)
        for name, count in self.failures.items():
            if count > 1:
                logger.warning("the tracker %s failed %d times in this run", name, count)


class Failures(Counter[str]):
    """How often each tracker failed. The first time is a warning."""

    def report(self, name: str, error: Exception) -> None:
        self[name] += 1
        if self[name] == 1:
            logger.warning("the tracker %s failed (%s); training goes on, further failures are counted", name, error)


def make_trackers(
    recipe: Logging,
    folder: RunFolder,
    run_name: str,
    saved_state: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    console: Tracker | None = None,
) -> Trackers:
    """Starts what `recipe.trackers` names; `saved_state` is the `state()` of the run that is resumed.

    `config` is shown by trackers that have a place for it (the recipe as a plain mapping). `console` gets the numbers
    too if the recipe names it.
    """
    saved_state = saved_state or {}
    failures = Failures()
    trackers: dict[str, Tracker] = {"metrics.jsonl": MetricsFile(folder.metrics)}
    for name in recipe.trackers:
        if name == "console":
            if console is not None:
                trackers[name] = console
            continue
        if find_spec(name) is None:
            raise UserError(f"`logging.trackers` names {name}, which is not installed: pip install 'corral[{name}]'")
        saved = saved_state.get(name, {})
        start = partial(ADAPTERS[name], folder.logs, recipe.project, run_name, config or {}, saved)
        try:
            trackers[name] = TrackerThread(name, start, failures)
        except Exception as error:
            if not saved:
                raise UserError(
                    f"the tracker {name} could not start ({error}). Set it up, or take it out of `logging.trackers`"
                ) from error
            logger.warning("the tracker %s could not start (%s); the run goes on without it", name, error)
    return Trackers(trackers, saved_state, failures)


class TrackerThread:
    """A tracker and the thread it lives in.

    The thread consumes rows from a queue and waits for nothing else; None in the queue means close. Who starts it waits
    for the tracker's start, who closes it for the rows that are left, both with a deadline: a thread that does not
    return in time is left behind (it is a daemon, and does not keep the process alive).
    """

    def __init__(self, name: str, start: Callable[[], Tracker], failures: Failures) -> None:
        self._name = name
        self._failures = failures
        self._rows: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        started: Future[Tracker] = Future()
        self._thread = threading.Thread(target=self._live, args=(start, started), name=f"tracker {name}", daemon=True)
        self._thread.start()
        try:
            error = started.exception(START_DEADLINE_S)
        except TimeoutError:
            raise UserError(f"no answer within {START_DEADLINE_S:.0f} s") from None
        if error is not None:
            raise error
        self._tracker = started.result()

    def _live(self, start: Callable[[], Tracker], started: "Future[Tracker]") -> None:
        try:
            tracker = start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(tracker)
        while (row := self._rows.get()) is not None:
            try:
                tracker.log(*row)
            except Exception as error:
                self._failures.report(self._name, error)
        try:
            tracker.close()
        except Exception as error:
            self._failures.report(self._name, error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._rows.qsize() >= MAX_WAITING_ROWS:
            raise OverflowError(f"{MAX_WAITING_ROWS} rows are waiting for it")
        self._rows.put((step, dict(metrics)))

    def close(self) -> None:
        self._rows.put(None)
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"it did not finish within {CLOSE_DEADLINE_S:.0f} s")

    def state(self) -> dict[str, str]:
        return self._tracker.state()
