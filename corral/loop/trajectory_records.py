"""What is written down of trajectories (`observe/trajectory_store.py`): text, tokens, and what was computed of them."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from corral.data.batch import Batch, FloatArray, IntArray, Trajectory, in_prefix_order
from corral.data.images import decode_tokens
from corral.observe.run_files import StepSamples
from corral.observe.trajectory_store import TrajectoryWriter
from corral.recipe.presets import ResolvedAlgorithm

if TYPE_CHECKING:
    from corral.data.rows import Row
    from corral.data.sources import PreparedPrompt
    from corral.loop.rollout_step import RolloutResult  # which imports torch: the process of the files does without

logger = logging.getLogger(__name__)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no character, or not yet."""
MAX_TOKENS_OF_CHARACTER = 4
"""UTF-8 has up to four bytes for a character."""
MAX_SHOWN = 4000
"""Number of characters of a prompt and of a reply in the tables of trackers."""
SAMPLE_COLUMNS = ("prompt id", "sample", "prompt", "reply", "reward", "advantage", "stop")


@dataclass
class StepTrajectories:
    """All that is written down of a step, before anything is made of it: cheap to gather, and to send elsewhere."""

    step: int
    trajectories: list[Trajectory]
    part: str = ""
    """Separates records of the same step, such as those of a validation."""
    left_out: list[str | None] = field(default_factory=list)
    """Why each trajectory was not trained on; None: it was. Empty for what nobody trains on."""
    columns: dict[str, FloatArray] = field(default_factory=dict)
    """Numbers that were computed of each token of the first trajectories, those of the batch."""
    details: dict[str, FloatArray] = field(default_factory=dict)
    """The same, as the policy had them when it was trained on; NaN in trajectories that it was not trained on."""
    offsets: IntArray = field(default_factory=lambda: np.zeros(1, np.int64))
    """Where the trajectories of the batch begin in the columns."""
    asked: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    """Of each row its question and its answer, where it has one, as text."""

    @classmethod
    def of(
        cls,
        step: int,
        rollout: "RolloutResult",
        batch: Batch,
        algorithm: ResolvedAlgorithm,
        why_not_trained: str | None,
        prompts: Sequence["PreparedPrompt"],
    ) -> Self:
        """What was trained on, and then what was left out. `why_not_trained`: why no update was made with any of the
        batch. `prompts`: all of the data, by row."""
        reasons = [one.mask_reason or why_not_trained for one in rollout.trajectories]
        others = {
            "no reward": rollout.dropped,
            "zero-variance group": rollout.filtered,
            "environment failed": rollout.unanswered,
        }
        trajectories = [*rollout.trajectories, *(one for some in others.values() for one in some)]
        reasons += [reason for reason, some in others.items() for _ in some]
        columns = {name: batch.columns[name] for name in recorded_columns(batch, algorithm)}
        asked = asked_of(trajectories, prompts)
        return cls(step, trajectories, "", reasons, columns, batch.details, batch.offsets, asked)

    def records(self, texts: "TokenTexts") -> Iterator[dict[str, Any]]:
        """Yields what the store has of each trajectory."""
        num_trained = len(self.offsets) - 1
        for i, record in enumerate(trajectory_records(self.trajectories, texts)):
            if self.left_out:
                record["left_out"] = self.left_out[i]
            if record["row"] in self.asked:
                record["question"], record["answer"] = self.asked[record["row"]]
            if i < num_trained:
                span = slice(int(self.offsets[i]) + len(record["prompt_tokens"]), int(self.offsets[i + 1]))
                record |= {name: column[span] for name, column in self.columns.items()}
                details = {name: column[span] for name, column in self.details.items()}
                record |= {name: own for name, own in details.items() if not np.isnan(own).any()}
                if "implicit_rewards" in record:
                    record["reward"] = float(record.pop("implicit_rewards")[0])
            yield record


def asked_of(
    trajectories: Sequence[Trajectory], prompts: Sequence["PreparedPrompt"]
) -> dict[int, tuple[str, str | None]]:
    """Returns what each of their rows asks, the last message of its user, and its answer."""
    return {number: asked_by(prompts[number].row) for number in {one.row for one in trajectories}}


def asked_by(row: "Row") -> tuple[str, str | None]:
    questions = [message["content"] for message in row.prompt if message["role"] == "user"]
    answer = row.answer if isinstance(row.answer, str) else json.dumps(row.answer, ensure_ascii=False, default=str)
    return questions[-1] if questions else "", None if row.answer is None else answer


WriteStep = Callable[[StepTrajectories], Any]


def writes_here(folder: Path, tokenizer: Any) -> WriteStep:
    """Makes and writes the records in the calling thread."""
    writer, texts = TrajectoryWriter(folder), TokenTexts(tokenizer)
    return lambda own: writer.write(own.step, own.records(texts), own.part)


class BackgroundWriter:
    """Writes trajectories in a thread, while the run goes on: decoding, compressing and fsync leave the interpreter to
    others for most of their time. On a cluster, where a step has more than that, the thread hands them to a process
    (`loop/trajectory_process.py`).

    One step is in flight at most. The next one waits for it, and raises what it raised. A checkpoint waits too
    (`flush`): whatever is resumed from it has the files of all steps before. Nothing else changes trajectories and
    batches once they are handed over.
    """

    def __init__(self, write_step: WriteStep) -> None:
        self._write_step = write_step
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectories")
        self._pending: Future[Any] | None = None

    def write(self, own: StepTrajectories) -> None:
        self.flush()
        self._pending = self._thread.submit(self._write_step, own)

    def flush(self) -> None:
        """Waits until all is on disk. Raises what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.flush()
        except Exception as error:
            if kind is None:
                raise
            logger.warning("trajectories could not be written (%s)", error)  # the run has ended for another reason
        finally:
            self._thread.shutdown()


def recorded_columns(batch: Batch, algorithm: ResolvedAlgorithm) -> list[str]:
    """What was computed of tokens and is worth a look: old log-probs where they are not the engine's, returns where
    there is a critic."""
    skipped = {"old_logprobs"} if algorithm.old_logprobs != "recompute" else set()
    return [name for name in batch.columns if name not in skipped and (name != "returns" or "values" in batch.columns)]


def trajectory_records(trajectories: Sequence[Trajectory], texts: "TokenTexts") -> Iterator[dict[str, Any]]:
    branches = find_branches(trajectories)
    prompts: dict[bytes, tuple[str, list[int]]] = {}
    for i, trajectory in enumerate(trajectories):
        start = trajectory.prompt_length
        prompt_tokens, response_tokens = trajectory.tokens[:start], trajectory.tokens[start:]
        key = prompt_tokens.tobytes()
        if key not in prompts:  # samples of one prompt are many
            prompts[key] = texts.decode(prompt_tokens)
        prompt, prompt_chars = prompts[key]
        response, response_chars = texts.decode(response_tokens)
        parent, num_shared = branches[i]
        turns = turn_spans(trajectory)
        is_sampled = bool((trajectory.versions >= 0).any())  # and not the answer of a row, which has no reward
        yield {
            "prompt_id": trajectory.prompt_id,
            "sample": trajectory.sample,
            "row": trajectory.row,
            "tag": trajectory.tag,
            "reward": None if trajectory.is_dropped or not is_sampled else trajectory.reward,
            "rewards": trajectory.rewards,
            "metrics": trajectory.metrics,
            "stop": str(trajectory.stop),
            "error": trajectory.error,
            "is_chosen": trajectory.is_chosen,
            "parent": parent,
            "num_shared": num_shared,
            "tool_errors": trajectory.tool_errors,
            **frame_columns(trajectory.frames),
            "turn_rewards": [reward for _, reward in trajectory.turn_rewards],
            "turn_starts": [first - start for first, _ in turns],
            "turn_ends": [end - start for _, end in turns],
            "generate_s": [generate_s for generate_s, _ in trajectory.turn_times],
            "environment_s": [environment_s for _, environment_s in trajectory.turn_times],
            "prompt": prompt,
            "response": response,
            "prompt_tokens": prompt_tokens,
            "prompt_chars": prompt_chars,
            "response_tokens": response_tokens,
            "response_chars": response_chars,
            "generated": trajectory.generated[start:],
            **(
                {"logprobs": trajectory.logprobs[start:], "versions": trajectory.versions[start:]} if is_sampled else {}
            ),
        }


def frame_columns(frames: Sequence[str | bytes | None]) -> dict[str, list[str] | list[bytes]]:
    """What the environment drew: `frames` if that is text, `pictures` if it is PNG files; one for each state, empty
    where it drew nothing of that kind."""
    columns: dict[str, list[str] | list[bytes]] = {}
    if any(isinstance(frame, str) for frame in frames):
        columns["frames"] = [frame if isinstance(frame, str) else "" for frame in frames]
    if any(isinstance(frame, bytes) for frame in frames):
        columns["pictures"] = [frame if isinstance(frame, bytes) else b"" for frame in frames]
    return columns


def step_samples(trajectories: Sequence[Trajectory], batch: Batch, tokenizer: Any, num_shown: int) -> StepSamples:
    """What trackers show of a step: some trajectories, evenly spread over the batch, and numbers of all."""
    rows = list[list[str | float]]()
    advantages = batch.columns["advantages"]
    for i in np.unique(np.linspace(0, len(batch) - 1, min(num_shown, len(batch)), dtype=np.int64)).tolist():
        one, span = trajectories[i], slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
        own = advantages[span][one.generated]
        texts = (decode_tokens(tokenizer, part) for part in np.split(one.tokens, [one.prompt_length]))
        prompt, reply = (text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…" for text in texts)
        rows.append(
            [
                one.prompt_id,
                one.sample,
                prompt,
                reply,
                one.reward,
                float(own.mean()) if len(own) else 0.0,
                str(one.stop),
            ]
        )
    histograms = {
        "reward": np.array([one.reward for one in trajectories]),
        "length": np.array([one.num_generated for one in trajectories]),
        "advantage": advantages[batch.generated],
    }
    return StepSamples(SAMPLE_COLUMNS, rows, histograms)


def turn_spans(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Bounds of the tokens that were generated in each turn. A turn ends where its reward is, or before an
    observation."""
    bounds = np.flatnonzero(np.diff(trajectory.generated, prepend=False, append=False)).reshape(-1, 2)
    rewarded = [index + 1 for index, _ in trajectory.turn_rewards]
    spans: list[tuple[int, int]] = []
    for start, end in bounds.tolist():
        cuts = [start, *(cut for cut in rewarded if start < cut < end), end]
        spans += pairwise(cuts)
    return spans


def find_branches(trajectories: Sequence[Trajectory]) -> list[tuple[int | None, int]]:
    """The token tree of each prompt's samples: for each trajectory the index of the one that it branches off from (None
    for the first), and the number of tokens that it shares with it, those of the prompt included."""
    groups: dict[int, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.prompt_id, []).append(i)
    branches: list[tuple[int | None, int]] = [(None, 0)] * len(trajectories)
    for rows in groups.values():
        parent = None
        for place, num_shared in in_prefix_order([trajectories[i].tokens for i in rows]):
            branches[rows[place]] = parent, num_shared
            parent = rows[place]
    return branches


class TokenTexts:
    """Decodes tokens, and counts how many characters of the text each of them adds. Texts of single tokens are kept."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Some decoders strip the space of the first token: every piece is decoded behind this one.
        self.anchor: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self.anchor_length = len(tokenizer.decode(self.anchor))
        self.pieces: dict[int, str] = {}
        self.piece_of_run = lru_cache(maxsize=2**16)(self._piece_of_run)

    def decode(self, tokens: IntArray) -> tuple[str, list[int]]:
        """Returns the text, and for each token the number of characters that it adds. A character of several tokens is
        added by the last of them."""
        ids: list[int] = tokens.tolist()
        text = decode_tokens(self.tokenizer, tokens)
        for id in set(ids) - self.pieces.keys():
            self.pieces[id] = self._piece_of_run(id)
        pieces = [self.pieces[id] for id in ids]
        if tokens.size and tokens.min() < 0:  # an image is a run of one number, and has one text
            pieces = ["" if i and ids[i] < 0 and ids[i] == ids[i - 1] else piece for i, piece in enumerate(pieces)]
        if "".join(pieces) == text:
            return text, [len(piece) for piece in pieces]
        return text, self._align(text, ids, pieces)

    def _piece_of_run(self, *ids: int) -> str:
        return decode_tokens(self.tokenizer, [*self.anchor, *ids])[self.anchor_length :]

    def _align(self, text: str, ids: Sequence[int], pieces: Sequence[str]) -> list[int]:
        """Finds the texts of tokens in a text that they do not just add up to.

        A token whose own text is not there, such as a part of a character, waits: for those that complete it, or, where
        nothing does (bytes that are no character), for the next token whose text is there. What they waited for is
        added by the last of them.
        """
        lengths = [0] * len(ids)
        position, waiting, num_waiting = 0, 0, 0
        for i, piece in enumerate(pieces):
            whole = piece
            if 0 < num_waiting < MAX_TOKENS_OF_CHARACTER:
                whole = self.piece_of_run(*ids[i - num_waiting : i + 1])
            found = position if REPLACEMENT not in whole and text.startswith(whole, position) else -1
            if found < 0 and num_waiting and piece and REPLACEMENT not in piece:
                # What waits has one character at least, and no more than its tokens have one by one.
                found, whole = text.find(piece, position + 1, position + waiting + len(piece)), piece
                lengths[i - 1] = max(found - position, 0)
            if found < 0:
                waiting, num_waiting = waiting + len(piece), num_waiting + 1
                continue
            lengths[i] = len(whole)
            position, waiting, num_waiting = found + len(whole), 0, 0
        if lengths:
            lengths[-1] += len(text) - position
        return lengths
