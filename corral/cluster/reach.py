"""Which cluster a command means, and a way into it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from corral.cluster.gcs import Gcs, NoAnswer, Refused
from corral.cluster.headfile import HeadFile, token_beside
from corral.observe.status_line import Countdown
from corral.recipe.errors import RunError, UserError
from corral.runtime.connection import find_cluster, join
from corral.runtime.network import answers
from corral.runtime.token import use_token

HOW_TO_START = "start it with `corral up` on each node, or say which one with --address HOST:PORT"


def reach(address: str | None = None) -> str:
    """host:port of the head of the cluster that is meant: what was said, else `RAY_ADDRESS`, else the one that this
    node is part of. Its token is used from here on."""
    found = find_cluster(address)
    if found is None:
        raise UserError(f"this node is not part of a cluster; {HOW_TO_START}")
    if not answers(found):
        raise UserError(f"the cluster's head, {found}, does not answer; {HOW_TO_START}")
    return found


@contextmanager
def attached(address: str | None = None) -> Iterator[None]:
    """As a driver of the cluster, which only a process on one of its nodes can be."""
    join(reach(address))
    try:
        yield
    finally:
        ray.shutdown()


def await_cluster(address: str | None, head_file: Path | None, countdown: Countdown) -> Gcs:
    """Its head, which may still be starting."""
    while True:
        try:
            return Gcs(reach(address_in(head_file) if head_file else address))
        except Refused:
            raise
        except UserError as error:
            if countdown.is_over:
                raise RunError(f"after {countdown.timeout_s:g} s: {error}") from None
            countdown.more(f"a cluster: {error}")


def address_in(path: Path) -> str:
    found = HeadFile.read(path)
    if found is None:
        raise NoAnswer(f"{path} is not there yet")
    if token_beside(path).is_file():
        use_token(token_beside(path))
    if (refusal := found.refusal(None)) is not None:
        raise NoAnswer(f"{path}: {refusal}")
    return found.address
