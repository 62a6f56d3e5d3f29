"""The nodes that are checked: this one alone, or all of a cluster. A node that does not answer is a finding, and is not
called again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass
class InspectedNode:
    ref: NodeRef
    actor: Any
    port: int  # of its raylet


class ClusterNodes(NodeSet):
    """All nodes of the cluster that this process has joined, each with an actor that inspects it.

    `entries`: as `ray.nodes()` has them."""

    def __init__(
        self, entries: Mapping[NodeRef, Mapping[str, Any]], request_for: Callable[[NodeRef], InspectionRequest]
    ) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from corral.runtime.nodes import remote_class

        super().__init__()
        self.members: dict[NodeRef, InspectedNode] = {}
        for ref, entry in entries.items():
            where = NodeAffinitySchedulingStrategy(entry["NodeID"], soft=False)
            actor = remote_class(NodeInspector, where, max_concurrency=ACTOR_THREADS).remote(request_for(ref))
            self.members[ref] = InspectedNode(ref, actor, entry["NodeManagerPort"])

    @property
    def refs(self) -> list[NodeRef]:
        return list(self.members)

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
        for ref, member in list(self.members.items()):
            if only is None or ref in only:
                try:
                    calls[getattr(member.actor, method.__name__).remote(*arguments(ref))] = member
                except Exception as error:  # what Ray raises here for an actor that it knows to be dead has no class
                    self._drop(member, first_line(error))
        if not calls:
            return {}
        done, late = ray.wait(list(calls), num_returns=len(calls), timeout=limit_s)
        for reference in done:
            member = calls[reference]
            try:
                results[member.ref] = ray.get(reference)
            except RayError as error:  # its own text and a traceback come before the line that was raised there
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                self._drop(member, lines[-1] if lines else first_line(error))
        for reference in late:
            self._drop(calls[reference], f"it has not answered for {limit_s:g} s")
        return {ref: results[ref] for ref in self.members if ref in results}

    def _drop(self, member: InspectedNode, why: str) -> None:
        """Leaves a node out, with what can be found from here: whether it takes connections from this node."""
        del self.members[member.ref]
        refusal = try_connection(ConnectionTarget(member.ref.address, member.port))
        what, fix = f"could not be checked: {why}", "see that the same Corral is installed there"
        if refusal:
            what += f"; and this node cannot connect to {member.ref.address}:{member.port} ({refusal})"
            fix = f"open the ports of {member.ref.host} to this node, or see whether it still runs"
        self.findings.append(Finding("error", "nodes", what, fix, (member.ref,)))

    def close(self) -> None:
        import ray

        closing = [member.actor.close.remote() for member in self.members.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for member in self.members.values():
            ray.kill(member.actor)
