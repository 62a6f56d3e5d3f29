"""What Ray's head process knows: the nodes, and a small store that all of them share. Asked directly, without joining
the cluster, so it takes half a second and works from outside."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from corral.recipe.errors import UserError
from corral.runtime.network import answers
from corral.runtime.nodes import RANK_LABEL, WORKER_SLOT

NAMESPACE = b"corral"
MARK_LABEL = "corral.mark"
ASK_S = 10
ALIVE = 0
"""In Ray's protocol."""


@dataclass(frozen=True)
class NodeEntry:
    id: str
    rank: int | None
    mark: str
    """Of the `corral up` that started it, or empty."""
    hostname: str
    address: str
    is_alive: bool
    is_head: bool
    resources: dict[str, float]

    @property
    def devices(self) -> int:
        """GPUs; on nodes without, worker slots."""
        return int(self.resources.get("GPU") or self.resources.get(WORKER_SLOT, 0))

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"{self.rank} "
        return f"{rank}{self.hostname} ({self.address})"


class NoAnswer(UserError):
    """Nothing listens there, or it does not answer as Ray's head does."""


class Refused(UserError):
    """It is there, and does not take the token."""


class Gcs:
    """A connection to the head process at `address`, host:port."""

    def __init__(self, address: str) -> None:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        if not answers(address):
            raise NoAnswer(f"no Ray cluster answers at {address}")
        self.address = address
        with translated(address):
            self.client = GcsClient(address=address)

    @property
    def cluster_id(self) -> str:
        return str(self.client.cluster_id.hex())

    def nodes(self) -> list[NodeEntry]:
        """All that were ever in it, those with a rank first and in its order."""
        with translated(self.address):
            entries = self.client.get_all_node_info(timeout=ASK_S)
        found = [entry_of(node.hex(), info) for node, info in entries.items()]
        return sorted(found, key=lambda node: (node.rank is None, node.rank, not node.is_head, node.address))

    def put(self, key: str, value: Any) -> None:
        with translated(self.address):
            self.client.internal_kv_put(key.encode(), json.dumps(value).encode(), True, NAMESPACE, ASK_S)

    def get(self, key: str) -> Any:
        found = self.get_of_ray(key.encode(), NAMESPACE)
        return None if found is None else json.loads(found)

    def get_of_ray(self, key: bytes, namespace: bytes | None) -> bytes | None:
        """From the store that Ray keeps its own things in."""
        with translated(self.address):
            found: bytes | None = self.client.internal_kv_get(key, namespace, ASK_S)
        return found

    def delete_of_ray(self, key: bytes, namespace: bytes | None) -> None:
        with translated(self.address):
            self.client.internal_kv_del(key, False, namespace, ASK_S)


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Into what a user can do something about."""
    from ray.exceptions import AuthenticationError, RaySystemError, RpcError

    try:
        yield
    except AuthenticationError as error:
        raise Refused(
            f"the Ray cluster at {address} refuses this token; copy the head's ~/.corral/token to this node, or set "
            "RAY_AUTH_TOKEN"
        ) from error
    except (RpcError, RaySystemError, RuntimeError) as error:
        raise NoAnswer(f"what answers at {address} is not the head of a Ray cluster that runs") from error


def entry_of(node: str, info: Any) -> NodeEntry:
    labels = dict(info.labels)
    rank = labels.get(RANK_LABEL, "")
    return NodeEntry(
        id=node,
        rank=int(rank) if rank.isdecimal() else None,
        mark=labels.get(MARK_LABEL, ""),
        hostname=info.node_manager_hostname,
        address=info.node_manager_address,
        is_alive=info.state == ALIVE,
        is_head=info.is_head_node,
        resources=dict(info.resources_total),
    )
