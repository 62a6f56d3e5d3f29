"""What is installed on a node, and whether all nodes have the same."""

import hashlib
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import corral
from corral.cluster.doctor.findings import Finding, Level, Place, hosts
from corral.cluster.report import installed, torch_version

MUST_MATCH: dict[str, Level] = {
    "corral": "error",
    "ray": "error",
    "python": "error",
    "torch": "error",
    "transformers": "warning",
    "driver": "warning",
    "GPUs": "warning",
}
"""Messages between processes, and collectives, change between versions of the first four: a mixture fails or hangs.
With the others the numbers may differ, or the speed."""
SHOWN = ("corral", "ray", "python", "torch", "transformers", "driver", "GPUs")


def own_versions(driver: str, gpus: str) -> dict[str, str]:
    return {
        "corral": own_version(),
        "corral at": str(source_folder()),
        "ray": installed("ray"),
        "python": platform.python_version(),
        "torch": torch_version(),
        "transformers": installed("transformers"),
        "driver": driver or "none",
        "GPUs": gpus or "none",
    }


def own_version() -> str:
    """`0.2.0 (1f3a9c02)`, or from a folder that was never installed `(1f3a9c02)`."""
    version = installed("corral")
    return f"({source_digest()})" if version == "none" else f"{version} ({source_digest()})"


def source_folder() -> Path:
    return Path(corral.__path__[0]).resolve()


def source_digest() -> str:
    """Of Corral's own files: two checkouts of one version are not the same program."""
    digest, folder = hashlib.blake2b(digest_size=4), source_folder()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def check_versions(versions: Mapping[Place, Mapping[str, str]]) -> Iterator[Finding]:
    """Those that most nodes have are taken to be right."""
    if len(versions) > 1:
        for name, level in MUST_MATCH.items():
            yield from compare_versions(name, level, versions)
        yield from compare_versions("corral at", "note", versions)
    if versions:
        first = next(iter(versions.values()))
        same = [name for name in SHOWN if len({own[name] for own in versions.values()}) == 1 and first[name] != "none"]
        if same:
            yield Finding("ok", "versions", ", ".join(f"{name} {first[name]}" for name in same), nodes=tuple(versions))


def compare_versions(name: str, level: Level, versions: Mapping[Place, Mapping[str, str]]) -> Iterator[Finding]:
    counts = Counter(own[name] for own in versions.values())
    usual = counts.most_common(1)[0][0]
    others: dict[str, list[Place]] = {}
    for place, own in versions.items():
        if own[name] != usual:
            others.setdefault(own[name], []).append(place)
    for found, places in others.items():
        rest = hosts([place for place, own in versions.items() if own[name] == usual])
        if name == "corral at":
            what, fix = f"Corral is imported from {found}, and on {rest} from {usual}", ""
        else:
            what = f"{name} {found}, and on {rest} {usual}"
            fix = f"install the same {name} on all nodes, then `corral down` and `corral up`"
            if name == "GPUs":
                fix = "nothing, if that is meant: all wait for the slowest, and the smallest memory is the limit"
        yield Finding(level, "versions", what, fix, tuple(places))
