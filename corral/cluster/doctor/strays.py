"""Processes that earlier runs have left behind: a worker without a raylet, and a raylet whose head does not answer,
belong to nobody any more."""

from collections.abc import Callable, Collection, Iterable, Iterator

from corral.cluster.doctor.findings import Finding
from corral.cluster.processes import SERVERS, Process, Table, head_of, raylet_of

SHOWN = 6


def check_processes(
    table: Table, cluster: str | None, answers: Callable[[str], bool], own: Collection[str] = ()
) -> Iterator[Finding]:
    """`cluster`: host:port of the head of the one that is checked. `answers`: whether a head does. `own`: heads of
    clusters of which `corral up` made this node a part."""
    rays = [process for process in table.values() if process.is_rays and not process.is_elsewhere]
    lost = [process for process in rays if process.name.startswith("ray::") and raylet_of(process, table) is None]
    heads = {head for process in rays if (head := head_of(process)) is not None}
    dead = {head for head in heads if head != cluster and not answers(head)}
    stray = [*lost, *(process for process in rays if head_of(process) in dead)]
    if stray:
        what = f"{words(stray)}: of a Ray cluster that is gone; they keep memory, ports and devices"
        others = [process for process in stray if head_of(process) not in own]
        fixes = [f"kill {' '.join(str(process.pid) for process in others)}"] if others else []
        fixes += ["`corral down`"] if len(others) < len(stray) else []
        yield Finding("warning", "stray processes", what, " and ".join(fixes))
    for head in sorted(heads - dead - {cluster}):
        servers = [process for process in rays if head_of(process) == head and process.name in SERVERS]
        if servers and cluster is None:
            yield Finding("note", "other clusters", f"part of the Ray cluster of {head}: {words(servers)}")
        elif servers:
            what = f"also part of another Ray cluster, of {head}: {words(servers)}; both may use the same devices"
            fix = "`corral down` there if it is yours; else ask its user, or leave this node out"
            yield Finding("warning", "other clusters", what, fix)
    if not stray:
        yield Finding("ok", "stray processes", "none of an earlier Ray")


def words(processes: Iterable[Process]) -> str:
    named = [str(process) for process in processes]
    more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    return ", ".join(named[:SHOWN]) + more
