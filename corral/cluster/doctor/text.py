"""A diagnosis for people: what is wrong first, with the fix below it, and what is well in one line per check."""

from collections.abc import Iterable, Sequence

from corral.cluster.doctor.collectives import table
from corral.cluster.doctor.diagnosis import Diagnosis
from corral.cluster.doctor.findings import LEVELS, Finding, Place, hosts

MOST_NAMED = 8


def in_words(diagnosis: Diagnosis) -> str:
    findings, places = diagnosis.findings, diagnosis.places
    names = dict.fromkeys(finding.check for finding in findings)
    width = max((len(name) for name in names), default=0)
    level_width = max(len(level) for level in LEVELS)
    lines = [header(places), ""]
    for level in LEVELS[:-1]:
        for finding, nodes in merged([one for one in findings if one.level == level]):
            lines.append(
                f"{level:<{level_width}}  {finding.check:<{width}}  {whereabouts(finding, nodes, places)}{finding.what}"
            )
            if finding.fix:
                lines.append(f"{'':<{level_width}}  {'':<{width}}  fix: {finding.fix}")
    for name in names:
        well = [finding for finding in findings if finding.check == name and finding.level == "ok"]
        if well:
            lines.append(f"{'ok':<{level_width}}  {name:<{width}}  {summary(well, places)}")
    if pairs := table(diagnosis.pairs):
        lines += ["", *pairs]
    return "\n".join([*lines, "", verdict(findings)])


def header(places: Sequence[Place]) -> str:
    if len(places) == 1 and not places[0].address:
        return f"this node, {places[0].host}"
    named = ", ".join(f"{place.rank} {place}" for place in places[:MOST_NAMED])
    more = f" and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else ""
    return f"{len(places)} node{'s' * (len(places) != 1)}: {named}{more}"


def merged(findings: Iterable[Finding]) -> list[tuple[Finding, list[Place]]]:
    """Those that say the same of several nodes, as one."""
    same: dict[tuple[str, ...], tuple[Finding, list[Place]]] = {}
    for finding in findings:
        key = (finding.check, finding.what, finding.fix, finding.device or "")
        _, nodes = same.setdefault(key, (finding, []))
        nodes += [place for place in finding.nodes if place not in nodes]
    return list(same.values())


def whereabouts(finding: Finding, nodes: Sequence[Place], places: Sequence[Place]) -> str:
    """`h1, h2: `; nothing where there is only one node, or the text has the names."""
    where = ""
    if nodes and len(places) > 1 and not all(place.host in finding.what.split(":")[0].split() for place in nodes):
        where = "all nodes" if set(nodes) == set(places) else hosts(nodes)
    parts = [part for part in (where, finding.device) if part]
    return f"{', '.join(parts)}: " if parts else ""


def summary(well: Sequence[Finding], places: Sequence[Place]) -> str:
    """Of one check on all nodes: what they say if it is the same, else of the first."""
    said = dict.fromkeys(finding.what for finding in well)
    nodes = dict.fromkeys(place for finding in well for place in finding.nodes)
    if len(places) == 1 or all(set(finding.nodes) in (set(), set(places)) for finding in well):
        return "; ".join(said)
    if len(said) == 1:
        return next(iter(said)) + ("" if set(nodes) == set(places) else f" (on {hosts(list(nodes))})")
    on = "on all nodes" if set(nodes) == set(places) else f"on {hosts(list(nodes))}"
    return f"{on}; {well[0].nodes[0].host}: {well[0].what}"


def verdict(findings: Sequence[Finding]) -> str:
    counts = {level: len(merged(one for one in findings if one.level == level)) for level in LEVELS[:-1]}
    words = [f"{number} {level}{'s' * (number != 1)}" for level, number in counts.items() if number]
    return ", ".join(words) if words else "nothing to object to"
