"""Log-probs of a frozen model for the answers of rows: they are the same in every epoch, so they are computed once."""

import hashlib
from pathlib import Path

import numpy as np

from corral.data.batch import Batch, FloatArray

FILE = "reference_logprobs.npz"
DIGEST_BYTES = 16


class ReferenceCache:
    """By the tokens themselves, so that it does not matter in which row, part or order of the data they come.

    A checkpoint has it (four bytes for each trained token that was seen): computed again after a resume, in other
    micro-batches, the numbers would be others in their last bit.
    """

    def __init__(self, model: str) -> None:
        """`model`: whose log-probs these are."""
        self.model = model
        self.num_missing = 0
        """Number of trajectories of the last batch that had to be computed."""
        self._logprobs: dict[bytes, FloatArray] = {}
        """Of the trained tokens of each trajectory."""

    def missing(self, batch: Batch) -> list[int]:
        """Trajectories of the batch that have to be computed; of equal ones the first."""
        new = {key: row for row, key in reversed(list(enumerate(keys_of(batch)))) if key not in self._logprobs}
        self.num_missing = len(new)
        return sorted(new.values())

    def add(self, batch: Batch, column: FloatArray) -> None:
        """Keeps what was computed, one number for each token of the batch."""
        for row, key in enumerate(keys_of(batch)):
            span = slice(batch.offsets[row], batch.offsets[row + 1])
            self._logprobs[key] = column[span][batch.generated[span]]

    def column(self, batch: Batch) -> FloatArray:
        """One number for each token of a batch of which nothing is missing."""
        column = np.zeros(len(batch.tokens), np.float32)
        column[batch.generated] = np.concatenate([self._logprobs[key] for key in keys_of(batch)])
        return column

    def save(self, folder: Path) -> None:
        np.savez(
            folder / FILE,
            model=self.model,
            keys=np.frombuffer(b"".join(self._logprobs), np.uint8),
            lengths=np.array([len(own) for own in self._logprobs.values()], np.int64),
            logprobs=np.concatenate([*self._logprobs.values(), np.empty(0, np.float32)]),
        )

    def load(self, folder: Path) -> None:
        """Takes over what a checkpoint has, unless it is another model's, or the checkpoint has none."""
        if not (folder / FILE).exists():
            return
        with np.load(folder / FILE) as stored:
            if str(stored["model"]) == self.model:
                keys = stored["keys"].tobytes()
                parts = np.split(stored["logprobs"], np.cumsum(stored["lengths"])[:-1])
                starts = range(0, len(keys), DIGEST_BYTES)
                self._logprobs = {keys[i : i + DIGEST_BYTES]: own for i, own in zip(starts, parts, strict=False)}


def keys_of(batch: Batch) -> list[bytes]:
    """For each trajectory a digest of its tokens, and of which of them are trained on."""
    spans = [slice(*span) for span in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]
    contents = (batch.tokens[span].tobytes() + batch.generated[span].tobytes() for span in spans)
    return [hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() for content in contents]
