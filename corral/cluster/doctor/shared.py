"""Whether a folder is the same one on all nodes: each leaves a file there, and looks for those of the others."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.cluster.doctor.findings import Finding, Place, hosts

PATIENCE_S = 10.0
"""Network file systems remember for some seconds what was not there."""
POLL_S = 0.2


@dataclass(frozen=True)
class SharedPath:
    path: str
    why: str
    """Who wants it to be shared: an option, or a key of the recipe."""


def file_name(token: str, number: int) -> str:
    return f".corral-doctor-{token}-{number}"


def leave(path: str, token: str, number: int) -> str:
    """What went wrong, or nothing."""
    try:
        with open(os.path.join(path, file_name(token, number)), "w") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def unseen(path: str, token: str, numbers: Sequence[int], within_s: float) -> list[int]:
    """Those whose files do not appear in time. Opened, not only listed: listings are remembered longer."""
    deadline, missing = time.monotonic() + within_s, list(numbers)
    while True:
        missing = [number for number in missing if not has(path, token, number)]
        if not missing or time.monotonic() > deadline:
            return missing
        with contextlib.suppress(OSError):
            os.listdir(path)
        time.sleep(POLL_S)


def has(path: str, token: str, number: int) -> bool:
    try:
        return Path(path, file_name(token, number)).read_text() == token
    except OSError:
        return False


def remove(path: str, token: str, number: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(path, file_name(token, number)))


def check_shared(
    shared: SharedPath, written: Mapping[Place, str], missing: Mapping[Place, Sequence[Place]]
) -> Iterator[Finding]:
    """`written`: what went wrong where a file was to be left. `missing`: whose files a node does not see."""
    check, path = "shared folder", shared.path
    for why in dict.fromkeys(why for why in written.values() if why):
        places = tuple(place for place, own in written.items() if own == why)
        fix = f"mount the same folder there, writable ({shared.why} names it)"
        yield Finding("error", check, f"{path} cannot be written to: {why}", fix, places)
    wrote = [place for place, why in written.items() if not why]
    alone = [place for place in wrote if set(missing.get(place, ())) >= {other for other in wrote if other != place}]
    if len(wrote) > 1 and len(alone) == len(wrote):
        what = f"{path} is another folder on each of {hosts(wrote)}: none sees what the others write"
        yield Finding("error", check, what, f"a file system that all share ({shared.why})", tuple(wrote))
    else:
        for place, others in missing.items():
            apart = [other for other in others if other not in alone or place in alone]
            if apart:
                what = f"{path} here is not the folder of {hosts(apart)}: what they write there does not appear"
                yield Finding("error", check, what, f"mount the shared file system there ({shared.why})", (place,))
    if not any(written.values()) and not any(missing.values()):
        yield Finding("ok", check, f"{path} is the same on all nodes, and writable", nodes=tuple(written))
