"""What happened to every prompt, in `ledger.jsonl`: issued, generated, and trained once or dropped for a reason.

A prompt is identified by its id, which the sampler hands out: 0, 1, 2, ... over the whole run. The file has one line
for each event, with the ids as spans, and a line is in the file as a whole or not at all:

    {"step": 4, "issued": "32-39"}
    {"step": 4, "generated": "32-39"}
    {"step": 4, "dropped": "37", "reason": "zero-variance group"}
    {"step": 4, "trained": "32-36,38-39"}

A checkpoint holds a snapshot, in which prompts with equal states are one line; resuming from the checkpoint puts it in
place of the file. What happened since is dropped, as it is lost from the weights, and prompts that were open are issued
again. Training a prompt twice is refused; whatever else does not add up, the audit reports.
"""

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from corral.observe.run_files import json_line, naming, write_atomically
from corral.recipe.errors import RunError, UserError

PromptIds = NDArray[np.int64]
SPAN = re.compile(r"([0-9]+)(?:-([0-9]+))?")

Event = Literal["issued", "generated", "trained", "dropped"]
EVENTS: tuple[Event, ...] = ("issued", "generated", "trained", "dropped")
UNKNOWN, ISSUED, GENERATED, TRAINED, DROPPED = range(5)
STATES: tuple[str, ...] = ("unknown", *EVENTS)

MAX_PROMPTS = 10**8
"""A damaged span would ask for any amount of memory: so many prompts take 2.3 GB."""
ROW = np.dtype([("state", "u1"), ("reason", "u2"), ("times", "u4"), ("issued_for", "i8"), ("ended_at", "i8")])
"""One prompt: its state, the index of the reason it was dropped for, how often it was issued and for which step last,
and the step at which it was trained or dropped."""


class Ledger:
    """A run's ledger. The constructor only reads the file, so a ledger that is being written can be read too."""

    name = "ledger.jsonl"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._prompts, self._size = _PromptStates(), 0
        """`_size`: bytes of complete lines. A torn line that a kill or a full disk left behind them is overwritten by
        the next."""
        self._file: tuple[int, int] | None = None
        """Device and inode of what was read."""
        self.read_on()

    def read_on(self) -> bool:
        """Reads the lines that another process has written since. False: the file is another one now, and has to be
        read anew."""
        if not self.path.exists():
            return self._file is None
        with self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            if self._file not in (None, (found.st_dev, found.st_ino)) or found.st_size < self._size:
                return False
            self._file = found.st_dev, found.st_ino
            file.seek(self._size)
            content = file.read()
        _load(self._prompts, content, str(self.path))
        self._size += content.rfind(b"\n") + 1
        return True

    def issue(self, step: int, prompt_ids: Iterable[int]) -> None:
        """Records prompts to be trained at `step`. Open ones may be issued again, when their trajectories are lost."""
        self._record("issued", step, _sorted(prompt_ids))

    def generated(self, step: int, prompt_ids: Iterable[int]) -> None:
        self._record("generated", step, _sorted(prompt_ids))

    def trained(self, step: int, prompt_ids: Iterable[int]) -> None:
        """Raises a RunError, and writes nothing, if any of them has been trained before."""
        given = _sorted(prompt_ids)
        known = given[given < self._prompts.size]
        if len(again := known[self._prompts.states[known] == TRAINED]):
            raise RunError(
                f"step {step}: {_describe_prompts(again)} would be trained a second time, which is a bug; "
                f"the last checkpoint is as it was, and {self.path} says what happened to each prompt"
            )
        self._record("trained", step, given)

    def dropped(self, step: int, prompt_ids: Iterable[int], reason: str) -> None:
        """Records prompts that will not be trained, and why: `zero-variance group`, `environment failed`."""
        self._record("dropped", step, _sorted(prompt_ids), reason)

    def open(self, step: int) -> list[int]:
        """Prompts that were issued for that step, and neither trained nor dropped."""
        known = self._prompts.known
        prompt_ids: list[int] = np.flatnonzero(self._prompts.is_open & (known["issued_for"] == step)).tolist()
        return prompt_ids

    def open_steps(self) -> list[int]:
        steps: list[int] = np.unique(self._prompts.known["issued_for"][self._prompts.is_open]).tolist()
        return steps

    def num_dropped(self, step: int, reasons: Iterable[str]) -> int:
        """Number of prompts that were issued for that step and dropped for one of these reasons."""
        known = self._prompts.known
        numbers = [self._prompts.reasons.index(reason) for reason in reasons if reason in self._prompts.reasons]
        own = (self._prompts.states == DROPPED) & (known["issued_for"] == step)
        return int((own & np.isin(known["reason"], numbers)).sum())

    def snapshot(self) -> str:
        """The states of all prompts so far, the open ones included, for a checkpoint."""
        return b"".join(map(json_line, self._prompts.summary())).decode()

    def restore(self, text: str | None, step: int, next_prompt_id: int | None = None) -> None:
        """Puts a checkpoint's snapshot in place of the file. None: the ledger begins here, after `step` steps.
        `next_prompt_id`: the sampler's; elsewhere than behind all issued ones it would repeat some, or leave some
        out."""
        if text is None:
            text = json_line({"begins_after": step}).decode() if step > 0 else ""
        prompts = _PromptStates()
        _load(prompts, text.encode(), f"the ledger in the checkpoint of step {step}")
        if len(later := np.flatnonzero((prompts.states == TRAINED) & (prompts.known["ended_at"] > step))):
            raise RunError(
                f"the ledger in the checkpoint of step {step} says that {_describe_prompts(later)} were trained after "
                "that step; it does not belong to these weights. Resume from another checkpoint"
            )
        if not prompts.begins_after and next_prompt_id not in (None, prompts.size):
            raise RunError(
                f"the ledger in the checkpoint of step {step} has {prompts.size} prompts, and by its state.json "
                f"{next_prompt_id} were handed out: it is damaged. Resume from another checkpoint"
            )
        write_atomically(self.path, text)
        self._prompts, self._size = prompts, len(text.encode())

    def audit(self) -> "LedgerAudit":
        return self._prompts.audit()

    def history_of(self, prompt_id: int) -> list[str]:
        """The events of one prompt in order, one line of text for each."""
        content = self.path.read_bytes() if self.path.exists() else b""
        return [line for record in _records(content, str(self.path)) for line in _history_lines(record, prompt_id)]

    def _record(self, event: Event, step: int, prompt_ids: PromptIds, reason: str | None = None) -> None:
        if not len(prompt_ids):
            return
        record = {"step": step, event: format_spans(prompt_ids)}
        self._append(json_line(record if reason is None else {**record, "reason": reason}))
        self._prompts.apply(event, step, prompt_ids, reason)

    def _append(self, line: bytes) -> None:
        """One write at the end of the complete lines, over a torn line if there is one. It is not flushed to disk:
        after a power failure the run resumes from a checkpoint, whose snapshot is."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if os.fstat(descriptor).st_size < self._size:
                raise RunError(f"{self.path} is shorter than what this run wrote to it: something else has changed it")
            with naming(self.path):
                os.ftruncate(descriptor, self._size)
                if os.pwrite(descriptor, line, self._size) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
        self._size += len(line)


@dataclass(frozen=True)
class LedgerAudit:
    issued: int
    """Number of prompts, however often each was issued."""
    trained: int
    trained_steps: int
    """Number of steps at which any was trained."""
    dropped: dict[str, int]
    """Number of prompts by reason."""
    open: int
    reissued: int
    """How often a prompt was issued again."""
    gaps: tuple[int, ...]
    """Ids below the highest that never appear."""
    problems: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing was lost and nothing was trained twice. Prompts may be open: they are in progress."""
        return not self.problems and not self.gaps

    def text(self) -> str:
        reasons = ", ".join(f"{reason}: {number}" for reason, number in self.dropped.items())
        rows = [
            ("issued", self.issued, f"and {self.reissued} times again" if self.reissued else ""),
            ("trained", self.trained, f"in {self.trained_steps} step{'s' * (self.trained_steps != 1)}"),
            ("dropped", sum(self.dropped.values()), f"({reasons})" if reasons else ""),
            ("open", self.open, ""),
        ]
        width = max(len(str(number)) for _, number, _ in rows)
        lines = [f"{name:<8} {number:>{width}} {note}".rstrip() for name, number, note in rows]
        if self.gaps:
            gaps = _describe_prompts(np.array(self.gaps))
            lines.append(f"gap      {gaps}: never issued, though later ones were")
        lines += [f"problem  {problem}" for problem in self.problems]
        return "\n".join([*lines, "clean" if self.clean else "not clean"])

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "clean": self.clean}


class _PromptStates:
    """The state of every prompt: a row of 23 bytes for each, so that millions fit."""

    def __init__(self) -> None:
        self.rows = np.zeros(1024, ROW)
        self.size = 0
        """One more than the highest id."""
        self.reasons: list[str] = []
        self.problems: list[str] = []
        self.begins_after = 0
        """Number of steps before this ledger began; their prompts are not in it."""

    def apply(self, event: Event, step: int, prompt_ids: PromptIds, reason: str | None) -> None:
        self._grow(int(prompt_ids[-1]) + 1)
        before = self.rows[prompt_ids]
        state, never = before["state"], before["times"] == 0
        ended = (state == TRAINED) | (state == DROPPED)

        def problem(where: NDArray[np.bool_], what: str) -> None:
            if where.any():
                self.problems.append(f"step {step}: {_describe_prompts(prompt_ids[where])} {what}")

        if event == "issued":
            problem(state == TRAINED, "issued again after being trained")
            problem(state == DROPPED, "issued again after being dropped")
            self.rows["times"][prompt_ids] += 1
            self.rows["issued_for"][prompt_ids] = step
            self.rows["state"][prompt_ids[~ended]] = ISSUED
        elif event == "generated":
            problem(never, "generated without being issued")
            self.rows["state"][prompt_ids[state == ISSUED]] = GENERATED
        elif event == "trained":
            problem(state == TRAINED, "trained twice")
            problem(state == DROPPED, "trained after being dropped")
            problem(never & ~ended, "trained without being issued")
            problem(~never & ~ended & (before["issued_for"] != step), "trained, but issued for another step")
            self._end(prompt_ids[state != TRAINED], TRAINED, step)
        else:
            problem(state == TRAINED, "dropped after being trained")
            problem(state == DROPPED, "dropped twice")
            problem(never & ~ended, "dropped without being issued")
            self._end(prompt_ids[~ended], DROPPED, step, self._reason_number(reason or ""))

    def _end(self, prompt_ids: PromptIds, state: int, step: int, reason: int = 0) -> None:
        for field, value in (("state", state), ("ended_at", step), ("reason", reason)):
            self.rows[field][prompt_ids] = value

    def _reason_number(self, reason: str) -> int:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason)

    def _grow(self, size: int) -> None:
        if size > len(self.rows):
            more = np.zeros(max(size, 2 * len(self.rows)) - len(self.rows), ROW)
            self.rows = np.concatenate([self.rows, more])
        self.size = max(self.size, size)

    @property
    def known(self) -> NDArray[Any]:
        return self.rows[: self.size]

    @property
    def states(self) -> NDArray[Any]:
        return self.known["state"]

    @property
    def is_open(self) -> NDArray[np.bool_]:
        return np.isin(self.states, (ISSUED, GENERATED))

    def summary(self) -> Iterator[dict[str, Any]]:
        """Records from which `_load` makes the same state: one for all prompts whose rows are equal."""
        if self.begins_after:
            yield {"begins_after": self.begins_after}
        for problem in self.problems:
            yield {"problem": problem}
        same: dict[tuple[int, ...], list[str]] = {}
        starts = np.r_[0, np.flatnonzero(self.known[1:] != self.known[:-1]) + 1, self.size].tolist()
        for first, end in pairwise(starts):
            if first < end:
                same.setdefault(self.known[first].item(), []).append(format_span(first, end - 1))
        for (state, reason, times, issued_for, ended_at), spans in same.items():
            if state == UNKNOWN:
                continue
            record = {"prompts": ",".join(spans), "are": STATES[state], "times": times, "issued_for": issued_for}
            if state in (TRAINED, DROPPED):
                record["step"] = ended_at
            if state == DROPPED:
                record["reason"] = self.reasons[reason]
            yield record

    def load(self, record: dict[str, Any]) -> None:
        """Applies a line of the file: of a snapshot, or an event."""
        if "begins_after" in record:
            self.begins_after = int(record["begins_after"])
        elif "problem" in record:
            self.problems.append(str(record["problem"]))
        elif "prompts" in record:
            prompt_ids = prompt_ids_in(parse_spans(record["prompts"]))
            self._grow(int(prompt_ids[-1]) + 1)
            state, step = STATES.index(record["are"]), int(record.get("step", 0))
            self._end(prompt_ids, state, step, self._reason_number(record["reason"]) if state == DROPPED else 0)
            self.rows["times"][prompt_ids] = int(record["times"])
            self.rows["issued_for"][prompt_ids] = int(record["issued_for"])
        else:
            event = _event_of(record)
            self.apply(event, int(record["step"]), prompt_ids_in(parse_spans(record[event])), record.get("reason"))

    def audit(self) -> LedgerAudit:
        state, times = self.states, self.known["times"]
        counts = np.bincount(self.known["reason"][state == DROPPED], minlength=len(self.reasons)).tolist()
        gaps = np.flatnonzero(state == UNKNOWN)
        if self.begins_after and self.size:
            gaps = gaps[gaps > int(np.argmax(state != UNKNOWN))]
        return LedgerAudit(
            issued=int((times > 0).sum()),
            trained=int((state == TRAINED).sum()),
            trained_steps=len(np.unique(self.known["ended_at"][state == TRAINED])),
            dropped={reason: number for reason, number in zip(self.reasons, counts, strict=True) if number},
            open=int(self.is_open.sum()),
            reissued=int(np.maximum(times.astype(np.int64) - 1, 0).sum()),
            gaps=tuple(gaps.tolist()),
            problems=tuple(self.problems),
        )


def _load(prompts: _PromptStates, content: bytes, where: str) -> None:
    for number, record in enumerate(_records(content, where), start=1):
        try:
            prompts.load(record)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise _not_a_ledger(where, number) from error


def _records(content: bytes, where: str) -> Iterator[dict[str, Any]]:
    *lines, _torn = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            raise _not_a_ledger(where, number) from error
        # Ledgers of version 0.5 and before say `played`.
        if "played" in record:
            record["generated"] = record.pop("played")
        if record.get("are") == "played":
            record["are"] = "generated"
        yield record


def _not_a_ledger(where: str, line: int) -> UserError:
    return UserError(f"{where}, line {line} is not a line of a ledger. Was it edited?")


def _event_of(record: dict[str, Any]) -> Event:
    for event in EVENTS:
        if event in record:
            return event
    raise ValueError("this record has no event")


def _history_lines(record: dict[str, Any], prompt_id: int) -> Iterator[str]:
    if "prompts" in record:
        if not _has(record["prompts"], prompt_id):
            return
        if record["times"]:
            times = f", {record['times']} times" if record["times"] > 1 else ""
            yield f"issued for step {record['issued_for']}{times}"
        if record["are"] != "issued":
            yield _describe_event(record["are"], record.get("step", record["issued_for"]), record.get("reason"))
    elif "problem" not in record and "begins_after" not in record:
        event = _event_of(record)
        if _has(record[event], prompt_id):
            yield _describe_event(event, record["step"], record.get("reason"))


def _has(spans: str, prompt_id: int) -> bool:
    return any(prompt_id in span for span in parse_spans(spans))


def _describe_event(event: str, step: int, reason: str | None) -> str:
    preposition = "at" if event in ("trained", "dropped") else "for"
    return f"{event} {preposition} step {step}" + (f": {reason}" if reason else "")


def _describe_prompts(prompt_ids: PromptIds) -> str:
    return f"prompt{'s' * (len(prompt_ids) > 1)} {format_spans(prompt_ids)}"


def _sorted(prompt_ids: Iterable[int]) -> PromptIds:
    """Sorted and distinct: all samples of a prompt have its id."""
    given = np.unique(np.fromiter(prompt_ids, np.int64))
    assert not len(given) or given[0] >= 0, "a prompt's id is never negative"
    return given


def format_span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def format_spans(prompt_ids: PromptIds) -> str:
    """Sorted, distinct numbers as text that is short where they follow each other: `32-39,41`."""
    if not len(prompt_ids):
        return ""
    ends = np.flatnonzero(np.diff(prompt_ids) != 1)
    firsts, lasts = prompt_ids[np.r_[0, ends + 1]], prompt_ids[np.r_[ends, len(prompt_ids) - 1]]
    return ",".join(map(format_span, firsts.tolist(), lasts.tolist()))


def parse_spans(text: str) -> list[range]:
    """Raises a ValueError for what `format_spans` would not write."""
    spans: list[range] = []
    for part in text.split(","):
        match = SPAN.fullmatch(part)
        if match is None:
            raise ValueError(f"`{part}` is not a number or a span of numbers")
        span = range(int(match[1]), int(match[2] or match[1]) + 1)
        if not span or (spans and span.start < spans[-1].stop):
            raise ValueError(f"`{text}` is not in ascending order")
        if span.stop > MAX_PROMPTS:
            raise ValueError(f"`{part}` is beyond the {MAX_PROMPTS} prompts of a run")
        spans.append(span)
    return spans


def prompt_ids_in(spans: list[range]) -> PromptIds:
    return np.concatenate([np.arange(span.start, span.stop) for span in spans])
