"""A recipe that means the same in another folder: what it names relative to the one that it was submitted from is named
in full. Nothing is asked of a path but whether it exists here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from corral.data.plugins import is_spec
from corral.data.sources import GENERATORS
from corral.recipe.keys import KeyPath
from corral.recipe.schema import Recipe, Section, Source

AnySection = TypeVar("AnySection", bound=Section)


def anchored(recipe: Recipe, folder: Path) -> Recipe:
    """With the paths as they are seen from `folder`. What begins with `~` stays: the home directory is the one where
    the run will be."""
    changes: dict[KeyPath, Any] = {
        ("logging", "runs"): str(folder / recipe.logging.runs),
        ("model", "path"): model_path(recipe.model.path, folder),
        ("data", "train", "path"): source_path(recipe.data.train, folder),
    }
    if recipe.data.validation is not None:
        changes["data", "validation", "path"] = source_path(recipe.data.validation, folder)
    for role in ("critic", "reference"):
        if (path := getattr(recipe, role).path) is not None:
            changes[role, "path"] = model_path(path, folder)
    if recipe.checkpoint.resume not in ("auto", "never"):
        changes["checkpoint", "resume"] = anchor(recipe.checkpoint.resume, folder)
    if (template := recipe.model.chat_template) is not None:
        changes["model", "chat_template"] = template_text(template, folder)
    return changed(recipe, changes)


def changed(section: AnySection, changes: Mapping[KeyPath, Any]) -> AnySection:
    """A copy with other values at some keys. Those that are as they were do not count as written in the recipe."""
    update: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in changes):
        below = {path[1:]: value for path, value in changes.items() if path[0] == name}
        old = getattr(section, name)
        new = below[()] if () in below else changed(old, below)
        if new != old:
            update[name] = new
    return section.model_copy(update=update)


def anchor(path: str, folder: Path) -> str:
    return path if path.startswith("~") else str(folder / path)


def model_path(path: str, folder: Path) -> str:
    """A folder's; the name of a model on a hub looks like one, and stays."""
    is_folder = path.startswith(".") or path.count("/") > 1 or (folder / path).is_dir()
    return anchor(path, folder) if is_folder else path


def source_path(source: Source, folder: Path) -> str | list[str]:
    if isinstance(source.path, list):
        return [anchor(path, folder) for path in source.path]
    kind, _, name = source.path.partition(":")
    if kind == "hf" and name and (folder / name).is_dir():
        return f"hf:{folder / name}"
    return source.path if kind in GENERATORS or is_spec(source.path) else anchor(source.path, folder)


def template_text(template: str, folder: Path) -> str:
    """Of a file, what is in it: workers on other nodes do not see the file."""
    if "{" in template or not (folder / template).is_file():
        return template
    return (folder / template).read_text()
