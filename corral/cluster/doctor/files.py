"""Files that a recipe names, and whether every node has the same: models, code, templates."""

import glob
import hashlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from corral.cluster.doctor.findings import Finding, Place, hosts
from corral.cluster.doctor.machine import hugging_face_cache
from corral.data.plugins import is_spec
from corral.model.builtin_models import SMOLLM2, cached_folder
from corral.recipe.keys import dotted
from corral.recipe.placement import runs_on_ray
from corral.recipe.schema import Recipe, Source

SMALL = 2**20
"""Files of a folder up to this size are compared by content, larger ones by size."""


@dataclass(frozen=True)
class Named:
    """Something that the recipe names and a node must have."""

    key: str
    name: str
    """An absolute path, a module, or a model's name on the hub."""
    kind: Literal["path", "module", "hub", "recipe"]
    everywhere: bool
    """Not only where the run is started."""

    @property
    def in_words(self) -> str:
        return f"the recipe, {self.name}," if self.kind == "recipe" else f"`{self.key}`: {self.name}"


def named_in(recipe: Recipe, file: Path) -> list[Named]:
    """Paths as they are from here: a run's workers work in the folder in which it was started."""
    everywhere = runs_on_ray(recipe)
    found = [Named("recipe", str(file.resolve()), "recipe", everywhere)]
    for part in ("model", "critic", "reference"):
        path = getattr(recipe, part).path
        found += [] if path is None else [named_model(f"{part}.path", path, everywhere)]
    for name, service in recipe.cluster.services.items():
        if service.retriever is not None:
            index = str(Path(service.retriever).expanduser().resolve())
            found.append(Named(f"cluster.services.{name}.retriever", index, "path", everywhere))
    found += [named_code(dotted(key), spec, everywhere) for key, spec in recipe.code_names.items()]
    template = recipe.model.chat_template
    if template is not None and "{" not in template:
        found.append(Named("model.chat_template", str(Path(template).resolve()), "path", everywhere))
    if recipe.checkpoint.resume not in ("auto", "never"):
        found.append(Named("checkpoint.resume", str(Path(recipe.checkpoint.resume).resolve()), "path", everywhere))
    sources = {"data.train.path": recipe.data.train, "data.validation.path": recipe.data.validation}
    for key, source in sources.items():
        found += [] if source is None else named_data(key, source)
    return found


def named_model(key: str, path: str, everywhere: bool) -> Named:
    if path.lower() == SMOLLM2:
        return Named(key, str(cached_folder(SMOLLM2)), "path", everywhere)
    folder = Path(path).expanduser()
    if folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        return Named(key, str(folder.resolve()), "path", everywhere)
    return Named(key, path, "hub", everywhere)


def named_code(key: str, spec: str, everywhere: bool) -> Named:
    place = spec.rpartition(":")[0]
    if place.endswith(".py"):
        return Named(key, str(Path(place).expanduser().resolve()), "path", everywhere)
    return Named(key, place, "module", everywhere)


def named_data(key: str, source: Source) -> list[Named]:
    """Files only, and where the run is started: nobody else reads them."""
    paths = source.path if isinstance(source.path, list) else [source.path]
    files = [path for path in paths if not is_spec(path) and not glob.has_magic(path)]
    return [Named(key, str(Path(path).expanduser().resolve()), "path", False) for path in files]


def digest_of(named: Named) -> str:
    """Of what is there; empty where nothing is."""
    if named.kind == "hub":
        folder = hugging_face_cache() / f"models--{named.name.replace('/', '--')}" / "snapshots"
        return digest_of_path(folder)
    if named.kind == "module":
        try:
            spec = importlib.util.find_spec(named.name)
        except (ImportError, ValueError):
            return ""
        return digest_of_path(Path(spec.origin)) if spec is not None and spec.origin else ""
    return digest_of_path(Path(named.name))


def digest_of_path(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    try:
        if path.is_file():
            digest.update(path.read_bytes() if path.stat().st_size <= SMALL else str(path.stat().st_size).encode())
            return digest.hexdigest()
        if not path.is_dir():
            return ""
        for one in sorted(path.rglob("*")):
            if one.is_file() and not one.name.startswith("."):
                size = one.stat().st_size
                digest.update(f"{one.relative_to(path)} {size}\n".encode())
                digest.update(one.read_bytes() if size <= SMALL else b"")
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return digest.hexdigest()


def check_named(named: Named, digests: Mapping[Place, str], controller: Place, offline: bool) -> Iterator[Finding]:
    """`controller`: where this runs, and so a training would. `offline`: whether downloads are forbidden there."""
    missing = tuple(place for place, own in digests.items() if not own)
    unreadable = {place: own for place, own in digests.items() if " " in own}
    for place, why in unreadable.items():
        yield Finding("error", "files", f"`{named.key}`: {named.name} {why}", "let this user read it", (place,))
    if missing and named.kind == "hub":
        level: Literal["error", "note"] = "error" if offline else "note"
        what = f"`{named.key}`: {named.name} is not in the Hugging Face cache" + (
            ", and HF_HUB_OFFLINE is set" if offline else " and will be downloaded there"
        )
        yield Finding(level, "files", what, "download it once to a folder that all nodes share, and name that", missing)
    elif missing and named.name == str(cached_folder(SMOLLM2)):
        what = f"`{named.key}`: the built-in model has not been converted yet; the first use does it, in half a minute"
        yield Finding("note", "files", what, nodes=missing)
    elif controller in missing and named.kind != "recipe":
        yield Finding("error", "files", f"`{named.key}`: there is no {named.name}", "correct the path", (controller,))
    elif missing and named.everywhere and named.kind != "recipe":
        having = hosts([place for place in digests if place not in missing])
        what = f"`{named.key}`: there is no {named.name} here, and on {having} there is"
        yield Finding("error", "files", what, "put it at the same path on all nodes, or on a shared folder", missing)
    there = {place: own for place, own in digests.items() if own and place not in unreadable}
    usual = there.get(controller)
    others = tuple(place for place, own in there.items() if own != usual)
    if usual and others and named.kind != "hub":
        what = f"{named.in_words} is not the same as on {controller.host}"
        fix = "copy it from there, or use a shared folder"
        yield Finding("warning" if named.kind == "recipe" else "error", "files", what, fix, others)


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
