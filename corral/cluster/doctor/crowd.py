"""The nodes that are asked: this one alone, or all of a cluster. One that does not answer is a finding, and is not
asked again."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from corral.cluster.doctor.agent import Agent, Question
from corral.cluster.doctor.findings import Finding, Place
from corral.cluster.doctor.network import Target, try_target
from corral.recipe.errors import first_line

AGENT_THREADS = 8
GOODBYE_S = 5.0
Arguments = Callable[[Place], Sequence[Any]]


class Crowd(Protocol):
    findings: list[Finding]
    """Of nodes that did not answer."""

    @property
    def places(self) -> list[Place]:
        """Those that answer, in the order of their ranks."""
        ...

    def ask(
        self, method: str, arguments: Arguments | None = None, *, limit_s: float, only: Sequence[Place] | None = None
    ) -> dict[Place, Any]:
        """All nodes at once, or only some, each with its own arguments. What they answered."""
        ...

    def close(self) -> None: ...


class Alone:
    """This node, in this process."""

    def __init__(self, place: Place, question: Question) -> None:
        self.place, self.agent = place, Agent(question)
        self.findings: list[Finding] = []

    @property
    def places(self) -> list[Place]:
        return [self.place]

    def ask(
        self, method: str, arguments: Arguments | None = None, *, limit_s: float, only: Sequence[Place] | None = None
    ) -> dict[Place, Any]:
        if only is not None and self.place not in only:
            return {}
        return {self.place: getattr(self.agent, method)(*(arguments(self.place) if arguments else ()))}

    def close(self) -> None:
        self.agent.close()


@dataclass
class Member:
    """A node of a cluster."""

    place: Place
    actor: Any
    port: int
    """Of its raylet."""


@dataclass
class Cluster:
    """All nodes of the cluster that this process has joined, each through an actor."""

    members: dict[Place, Member]
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def start(cls, entries: Mapping[Place, Mapping[str, Any]], question: Callable[[Place], Question]) -> "Cluster":
        """`entries`: as `ray.nodes()` has them."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from corral.runtime.nodes import remote_class

        members = {}
        for place, entry in entries.items():
            where = NodeAffinitySchedulingStrategy(entry["NodeID"], soft=False)
            actor = remote_class(Agent, where, max_concurrency=AGENT_THREADS).remote(question(place))
            members[place] = Member(place, actor, entry["NodeManagerPort"])
        return cls(members)

    @property
    def places(self) -> list[Place]:
        return list(self.members)

    def ask(
        self, method: str, arguments: Arguments | None = None, *, limit_s: float, only: Sequence[Place] | None = None
    ) -> dict[Place, Any]:
        import ray
        from ray.exceptions import RayError

        asked, answers = {}, {}
        for place, member in list(self.members.items()):
            if only is None or place in only:
                try:
                    asked[getattr(member.actor, method).remote(*(arguments(place) if arguments else ()))] = member
                except Exception as error:  # what Ray raises here for an actor that it knows to be dead has no class
                    self._lose(member, first_line(error))
        if not asked:
            return {}
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=limit_s)
        for reference in done:
            member = asked[reference]
            try:
                answers[member.place] = ray.get(reference)
            except RayError as error:
                self._lose(member, failure(error))
        for reference in late:
            self._lose(asked[reference], f"it has not answered for {limit_s:g} s")
        return {place: answers[place] for place in self.members if place in answers}

    def _lose(self, member: Member, how: str) -> None:
        """With what can be said from here: whether the node takes connections from this one."""
        del self.members[member.place]
        why = try_target(Target(member.place.address, member.port))
        what, fix = f"could not be checked: {how}", "see that the same Corral is installed there"
        if why:
            what += f"; and this node cannot connect to {member.place.address}:{member.port} ({why})"
            fix = f"open the ports of {member.place.host} to this node, or see whether it still runs"
        self.findings.append(Finding("error", "nodes", what, fix, (member.place,)))

    def close(self) -> None:
        import ray

        goodbyes = [member.actor.close.remote() for member in self.members.values()]
        if goodbyes:
            ray.wait(goodbyes, num_returns=len(goodbyes), timeout=GOODBYE_S)
        for member in self.members.values():
            ray.kill(member.actor)


def failure(error: Exception) -> str:
    """The last line of what was raised there: Ray puts its own words and a traceback before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else first_line(error)


def round_trips(crowd: Crowd, place: Place, number: int, limit_s: float) -> list[tuple[float, float, float]]:
    """Sent, answered there, received; by the wall clocks."""
    found = []
    for _ in range(number):
        sent = time.time()
        answered = crowd.ask("clock", limit_s=limit_s, only=[place]).get(place)
        if answered is None:
            break
        found.append((sent, answered, time.time()))
    return found
