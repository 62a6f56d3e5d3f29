"""The nodes that are checked: this one alone, or all of a cluster. A node that does not answer is a finding, and is not
called again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from corral.cluster.doctor.findings import Finding, NodeRef
from corral.cluster.doctor.network_checks import ConnectionTarget, try_connection
from corral.cluster.doctor.node_inspector import InspectionRequest, NodeInspector
from corral.recipe.errors import first_line

ACTOR_THREADS = 8
CLOSE_S = 5.0
Result = TypeVar("Result")
NodeArguments = Callable[[NodeRef], Sequence[Any]]
Some = Sequence[NodeRef] | None  # None: all nodes


def same_for_all(*arguments: Any) -> NodeArguments:
    return lambda node: arguments


NONE_GIVEN = same_for_all()


class NodeSet:
    def __init__(self) -> None:
        self.findings: list[Finding] = []  # about nodes that did not answer

    @property
    def refs(self) -> list[NodeRef]:
        """The nodes that answer, in the order of their ranks."""
        raise NotImplementedError

    def call(
        self,
        method: Callable[..., Result],
        arguments: NodeArguments = NONE_GIVEN,
        *,
        limit_s: float,
        only: Some = None,
    ) -> dict[NodeRef, Result]:
        """Calls a method of `NodeInspector` on all nodes at once, or only on some, each with its own arguments. Returns
        the results of those that answered."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class LocalNode(NodeSet):
    """This node, inspected in this process."""

    def __init__(self, node: NodeRef, request: InspectionRequest) -> None:
        super().__init__()
        self.node, self.inspector = node, NodeInspector(request)

    @property
    def refs(self) -> list[NodeRef]:
        return [self.node]

    def call(
        self,
        method: Callable[..., Result],
        arguments: NodeArguments = NONE_GIVEN,
        *,
        limit_s: float,
        only: Some = None,
    ) -> dict[NodeRef, Result]:
        if only is not None and self.node not in only:
            return {}
        return {self.node: getattr(self.inspector, method.__name__)(*arguments(self.node))}

    def close(self) -> None:
        self.inspector.close()


class ClusterNodes(NodeSet):
    """All nodes of the cluster that this process has joined, each with an actor that inspects it.

    `entries`: as `ray.nodes()` has them."""

    def __init__(
        self, entries: Mapping[NodeRef, Mapping[str, Any]], request_for: Callable[[NodeRef], InspectionRequest]
    ) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from corral.runtime.nodes import remote_class

        super().__init__()
        self.ports = {ref: int(entry["NodeManagerPort"]) for ref, entry in entries.items()}  # of the raylets
        self.actors: dict[NodeRef, Any] = {}
        for ref, entry in entries.items():
            where = NodeAffinitySchedulingStrategy(entry["NodeID"], soft=False)
            kind = remote_class(NodeInspector, where, max_concurrency=ACTOR_THREADS)
            self.actors[ref] = kind.remote(request_for(ref))

    @property
    def refs(self) -> list[NodeRef]:
        return list(self.actors)

    def call(
        self,
        method: Callable[..., Result],
        arguments: NodeArguments = NONE_GIVEN,
        *,
        limit_s: float,
        only: Some = None,
    ) -> dict[NodeRef, Result]:
        import ray
        from ray.exceptions import RayError

        calls, results = {}, {}
        for ref, actor in list(self.actors.items()):
            if only is None or ref in only:
                try:
                    calls[getattr(actor, method.__name__).remote(*arguments(ref))] = ref
                except Exception as error:  # what Ray raises here for an actor that it knows to be dead has no class
                    self._drop(ref, first_line(error))
        if not calls:
            return {}
        done, late = ray.wait(list(calls), num_returns=len(calls), timeout=limit_s)
        for reference in done:
            ref = calls[reference]
            try:
                results[ref] = ray.get(reference)
            except RayError as error:  # its own text and a traceback come before the line that was raised there
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                self._drop(ref, lines[-1] if lines else first_line(error))
        for reference in late:
            self._drop(calls[reference], f"it has not answered for {limit_s:g} s")
        return {ref: results[ref] for ref in self.actors if ref in results}

    def _drop(self, ref: NodeRef, why: str) -> None:
        """Leaves a node out, with what can be found from here: whether it takes connections from this node."""
        del self.actors[ref]
        refusal = try_connection(ConnectionTarget(ref.address, self.ports[ref]))
        what, fix = f"could not be checked: {why}", "see that the same Corral is installed there"
        if refusal:
            what += f"; and this node cannot connect to {ref.address}:{self.ports[ref]} ({refusal})"
            fix = f"open the ports of {ref.host} to this node, or see whether it still runs"
        self.findings.append(Finding("error", "nodes", what, fix, (ref,)))

    def close(self) -> None:
        import ray

        closing = [actor.close.remote() for actor in self.actors.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for actor in self.actors.values():
            ray.kill(actor)
