"""Checks whether all nodes have the same software and the same files, and see the same shared folders."""

import contextlib
import glob
import hashlib
import importlib.util
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import corral
from corral.cluster.doctor.findings import Finding, FindingLevel, NodeRef, format_hosts
from corral.cluster.node_report import installed_version, torch_version
from corral.data.plugins import is_spec
from corral.data.sources import is_generated
from corral.hub import BUILTIN_MODELS, MODELSCOPE, cached_folder, cached_model, is_only_path
from corral.recipe.keys import dotted
from corral.recipe.placement import runs_on_ray
from corral.recipe.schema import Recipe

COMPARED: dict[str, FindingLevel] = {
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
SMALL_FILE = 2**20  # files up to this size are compared by content, larger ones by size
MARKER_S = 10.0  # network file systems cache for some seconds that a file was not there
POLL_S = 0.2


# --- software


def own_versions(driver: str, gpus: str) -> dict[str, str]:
    version = installed_version("corral")
    return {
        "corral": f"({source_digest()})" if version == "none" else f"{version} ({source_digest()})",
        "corral at": str(source_folder()),
        "ray": installed_version("ray"),
        "python": platform.python_version(),
        "torch": torch_version(),
        "transformers": installed_version("transformers"),
        "driver": driver or "none",
        "GPUs": gpus or "none",
    }


def source_folder() -> Path:
    return Path(corral.__path__[0]).resolve()


def source_digest() -> str:
    """Digest of Corral's own files: two checkouts of one version are not the same program."""
    digest, folder = hashlib.blake2b(digest_size=4), source_folder()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def check_versions(versions: Mapping[NodeRef, Mapping[str, str]]) -> Iterator[Finding]:
    """Versions that most nodes have are taken to be right."""
    if len(versions) > 1:
        for name, level in COMPARED.items():
            yield from compare_versions(name, level, versions)
        yield from compare_versions("corral at", "note", versions)
    if versions:
        first = next(iter(versions.values()))
        same = [name for name in COMPARED if {own[name] for own in versions.values()} == {first[name]} != {"none"}]
        if same:
            yield Finding("ok", "versions", ", ".join(f"{name} {first[name]}" for name in same), nodes=tuple(versions))


def compare_versions(
    name: str, level: FindingLevel, versions: Mapping[NodeRef, Mapping[str, str]]
) -> Iterator[Finding]:
    found = {node: own[name] for node, own in versions.items()}
    usual = Counter(found.values()).most_common(1)[0][0]
    rest = format_hosts(node for node, own in found.items() if own == usual)
    for other in dict.fromkeys(own for own in found.values() if own != usual):
        what = f"{name} {other}, and on {rest} {usual}"
        fix = f"install the same {name} on all nodes, then `corral down` and `corral up`"
        if name == "corral at":
            what, fix = f"Corral is imported from {other}, and on {rest} from {usual}", ""
        elif name == "GPUs":
            fix = "nothing, if that is meant: all wait for the slowest, and the smallest memory is the limit"
        yield Finding(level, "versions", what, fix, tuple(node for node, own in found.items() if own == other))


# --- files that a recipe names


@dataclass(frozen=True)
class RequiredFile:
    """Something that the recipe names and a node must have."""

    key: str
    name: str  # an absolute path, a module, or a model's name on the hub
    kind: Literal["path", "module", "hub", "recipe"]
    everywhere: bool = True  # not only where the run is started


def required_files(recipe: Recipe, file: Path) -> list[RequiredFile]:
    """Models, code, templates and data. Paths are as seen from here: a run's workers are in the folder of its start."""
    everywhere = runs_on_ray(recipe)

    def at_path(key: str, path: str, everywhere: bool = everywhere) -> RequiredFile:
        return RequiredFile(key, str(Path(path).expanduser().resolve()), "path", everywhere)

    found = [RequiredFile("recipe", str(file.resolve()), "recipe", everywhere)]
    for part in ("model", "critic", "reference", "reward_model"):
        path = getattr(recipe, part).path
        if path is not None and path.lower() in BUILTIN_MODELS:
            found.append(RequiredFile(f"{part}.path", str(cached_folder(path.lower())), "path", everywhere))
        elif path is not None:
            is_path = Path(path).expanduser().exists() or is_only_path(path)
            key = f"{part}.path"
            found.append(at_path(key, path) if is_path else RequiredFile(key, path, "hub", everywhere))
    for name, service in recipe.cluster.services.items():
        if service.retriever is not None:
            found.append(at_path(f"cluster.services.{name}.retriever", service.retriever))
    for path, spec in recipe.code_names.items():
        key, module = dotted(path), spec.rpartition(":")[0]
        is_file = module.endswith(".py")
        found.append(at_path(key, module) if is_file else RequiredFile(key, module, "module", everywhere))
    template = recipe.model.chat_template
    if template is not None and "{" not in template:
        found.append(at_path("model.chat_template", template))
    if recipe.checkpoint.resume not in ("auto", "never"):
        found.append(at_path("checkpoint.resume", recipe.checkpoint.resume))
    for place, source in recipe.data.all_sources.items():  # data is only read where the run is started
        if source.hub_name is not None:
            continue
        paths = source.path if isinstance(source.path, list) else [source.path]
        names = [path for path in paths if not (is_generated(path) or is_spec(path) or glob.has_magic(path))]
        found += [at_path(f"{dotted(place)}.path", path, False) for path in names]
    return found


def digest_of(required: RequiredFile) -> str:
    """Digest of what is there; empty where nothing is."""
    path = Path(required.name)
    if required.kind == "hub":
        if (found := cached_model(required.name)) is None:
            return ""
        path = found
    elif required.kind == "module":
        try:
            spec = importlib.util.find_spec(required.name)
        except (ImportError, ValueError):
            return ""
        if spec is None or not spec.origin:
            return ""
        path = Path(spec.origin)
    digest = hashlib.blake2b(digest_size=8)
    try:
        if path.is_file():
            digest.update(path.read_bytes() if path.stat().st_size <= SMALL_FILE else str(path.stat().st_size).encode())
            return digest.hexdigest()
        if not path.is_dir():
            return ""
        for one in sorted(path.rglob("*")):
            if one.is_file() and not one.name.startswith("."):
                size = one.stat().st_size
                digest.update(f"{one.relative_to(path)} {size}\n".encode())
                digest.update(one.read_bytes() if size <= SMALL_FILE else b"")
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return digest.hexdigest()


def check_required(
    required: RequiredFile, digests: Mapping[NodeRef, str], controller: NodeRef, offline: bool
) -> Iterator[Finding]:
    """`controller`: where this runs, and so a training would. `offline`: whether downloads are forbidden there."""
    name = f"`{required.key}`: {required.name}"
    missing = tuple(node for node, own in digests.items() if not own)
    unreadable = {node: own for node, own in digests.items() if " " in own}
    for node, why in unreadable.items():
        yield Finding("error", "files", f"{name} {why}", "let this user read it", (node,))
    if missing and required.kind == "hub":
        is_modelscope = required.name.startswith(MODELSCOPE)
        offline, cache = offline and not is_modelscope, "ModelScope's" if is_modelscope else "the Hugging Face"
        then = ", and HF_HUB_OFFLINE is set" if offline else " and will be downloaded there"
        fix = "download it once to a folder that all nodes share, and name that"
        what = f"{name} is not in {cache} cache{then}"
        yield Finding("error" if offline else "note", "files", what, fix, missing)
    elif missing and required.name in [str(cached_folder(name)) for name in BUILTIN_MODELS]:
        what = f"`{required.key}`: the built-in model is not made yet; the first use does it, within half a minute"
        yield Finding("note", "files", what, nodes=missing)
    elif controller in missing and required.kind != "recipe":
        what = f"`{required.key}`: there is no {required.name}"
        yield Finding("error", "files", what, "correct the path", (controller,))
    elif missing and required.everywhere and required.kind != "recipe":
        having = format_hosts(node for node in digests if node not in missing)
        what = f"`{required.key}`: there is no {required.name} here, and on {having} there is"
        yield Finding("error", "files", what, "put it at the same path on all nodes, or on a shared folder", missing)
    readable = {node: own for node, own in digests.items() if own and node not in unreadable}
    usual = readable.get(controller)
    others = tuple(node for node, own in readable.items() if own != usual)
    if usual and others and required.kind != "hub":
        is_recipe = required.kind == "recipe"
        subject = f"the recipe, {required.name}," if is_recipe else name
        what, fix = f"{subject} is not the same as on {controller.host}", "copy it from there, or use a shared folder"
        yield Finding("warning" if is_recipe else "error", "files", what, fix, others)


# --- shared folders: each node writes a marker file, and looks for those of the others


@dataclass(frozen=True)
class SharedPath:
    path: str
    why: str  # the option or recipe key that wants it to be shared


def marker_path(path: str, token: str, number: int) -> Path:
    return Path(path, f".corral-doctor-{token}-{number}")


def write_marker(path: str, token: str, number: int) -> str:
    """Returns what went wrong, or an empty text."""
    try:
        with marker_path(path, token, number).open("w") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def unseen_markers(path: str, token: str, numbers: Sequence[int], within_s: float) -> list[int]:
    """Numbers whose files do not appear in time. They are opened, not only listed: listings are cached longer."""

    def is_seen(number: int) -> bool:
        try:
            return marker_path(path, token, number).read_text() == token
        except OSError:
            return False

    deadline, missing = time.monotonic() + within_s, list(numbers)
    while True:
        missing = [number for number in missing if not is_seen(number)]
        if not missing or time.monotonic() > deadline:
            return missing
        with contextlib.suppress(OSError):
            os.listdir(path)
        time.sleep(POLL_S)


def remove_marker(path: str, token: str, number: int) -> None:
    with contextlib.suppress(OSError):
        marker_path(path, token, number).unlink()


def check_shared(
    shared: SharedPath, written: Mapping[NodeRef, str], missing: Mapping[NodeRef, Sequence[NodeRef]]
) -> Iterator[Finding]:
    """`written`: what went wrong when a node wrote its file. `missing`: whose files a node does not see."""
    check, path = "shared folder", shared.path
    for why in dict.fromkeys(why for why in written.values() if why):
        nodes = tuple(node for node, own in written.items() if own == why)
        fix = f"mount the same folder there, writable ({shared.why} names it)"
        yield Finding("error", check, f"{path} cannot be written to: {why}", fix, nodes)
    wrote = [node for node, why in written.items() if not why]
    alone = [node for node in wrote if set(missing.get(node, ())) >= {other for other in wrote if other != node}]
    if len(wrote) > 1 and len(alone) == len(wrote):
        what = f"{path} is another folder on each of {format_hosts(wrote)}: none sees what the others write"
        yield Finding("error", check, what, f"a file system that all share ({shared.why})", tuple(wrote))
    else:
        for node, others in missing.items():
            apart = [other for other in others if other not in alone or node in alone]
            if apart:
                what = f"{path} here is not the folder of {format_hosts(apart)}: what they write there does not appear"
                yield Finding("error", check, what, f"mount the shared file system there ({shared.why})", (node,))
    if not any(written.values()) and not any(missing.values()):
        yield Finding("ok", check, f"{path} is the same on all nodes, and writable", nodes=tuple(written))
