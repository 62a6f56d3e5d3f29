"""How far the nodes' clocks are apart. Tokens, logs and file times of several nodes are compared; and certificates of a
data hub are refused by a clock that is far off."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from corral.cluster.doctor.findings import Finding, Place

WARN_S, FAIL_S = 1.0, 30.0
ROUND_TRIPS = 5
FIX = "let chrony or systemd-timesyncd set the clock there (timedatectl set-ntp true)"


@dataclass(frozen=True)
class Offset:
    seconds: float
    """By which the other clock is ahead of this one."""
    error_s: float
    """The truth is within so much of it: half of the round trip."""


def offset_of(round_trips: Iterable[tuple[float, float, float]]) -> Offset:
    """From (sent here, answered there, received here). The shortest round trip says most: the answer was made at some
    time between the two."""
    sent, answered, received = min(round_trips, key=lambda one: one[2] - one[0])
    return Offset(answered - (sent + received) / 2, (received - sent) / 2)


def check_clocks(offsets: Mapping[Place, Offset]) -> Iterator[Finding]:
    """Against the clock of the node that asked, or, where most others differ from that, against theirs."""
    if len(offsets) < 2:
        return
    usual = sorted(offsets.values(), key=lambda offset: offset.seconds)[(len(offsets) - 1) // 2]
    is_fine = True
    for place, offset in offsets.items():
        apart = offset.seconds - usual.seconds
        certain = abs(apart) - offset.error_s - usual.error_s
        if certain > WARN_S:
            is_fine = False
            way = "ahead of" if apart > 0 else "behind"
            what = f"its clock is {abs(apart):.3g} s (± {offset.error_s:.1g}) {way} that of the other nodes"
            yield Finding("error" if certain > FAIL_S else "warning", "clocks", what, FIX, (place,))
    if is_fine:
        most = max(abs(offset.seconds - usual.seconds) + offset.error_s for offset in offsets.values())
        yield Finding("ok", "clocks", f"within {max(most, 0.001):.1g} s of each other", nodes=tuple(offsets))
