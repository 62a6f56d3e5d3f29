"""A key of another system with its value, and what becomes of it in a recipe of Corral."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from corral.migrate.value_kinds import format_value, is_secret, one_line, one_or_all
from corral.recipe.keys import KeyPath

Status = Literal["mapped", "converted", "built in", "no effect", "unsupported"]
LONGEST_SHOWN = 80
"""Characters of a value in a line for users."""
IMAGE_MODEL = re.compile(r"qwen(?:2|2\.5|3)[-_]vl", re.IGNORECASE)
OTHER_IMAGE_MODEL = re.compile(r"(?:.(?:vl\d*|vision|omni|\dv)|llava)(?![a-z0-9])", re.IGNORECASE)
ABSENT: Any = object()
"""The default of a key without one."""


@dataclass(frozen=True)
class ForeignValue:
    key: str
    """The key as it was written; an old spelling stays one."""
    value: Any
    where: str
    """`train.sh:12`. Empty: nobody wrote it, it is the other system's default."""
    added: bool = False
    """Whether it was written with Hydra's `+`: the other system's own configuration does not have it."""
    referenced: bool = False
    """Whether other values refer to it, or to what stands beside it."""

    def __str__(self) -> str:
        """The override on one line, without secrets."""
        value = "***" if is_secret(self.key) and self.value else one_line(format_value(self.value))
        return f"{self.key}={value if len(value) <= LONGEST_SHOWN else value[: LONGEST_SHOWN - 3] + '...'}"


@dataclass(frozen=True)
class Outcome:
    status: Status
    ours: Mapping[KeyPath, Any] = field(default_factory=dict)
    note: str = ""
    differs: bool = False
    """Whether the training is not quite the same, although Corral has the thing: the note has both sides."""


def mapped(ours: str | KeyPath, value: Any, note: str = "") -> Outcome:
    """An outcome that is the same thing under another name."""
    return Outcome("mapped", {as_path(ours): value}, note)


def converted(ours: Mapping[Any, Any], note: str, differs: bool = False) -> Outcome:
    """Another number or other words for the same thing; the note has both. Keys are `a.b` or tuples."""
    return Outcome("converted", {as_path(key): value for key, value in ours.items()}, note, differs)


def built_in(note: str) -> Outcome:
    """What Corral does anyway, or finds out by itself."""
    return Outcome("built in", {}, note)


def no_effect(why: str) -> Outcome:
    """Nothing reads it over there either."""
    return Outcome("no effect", {}, why)


def unsupported(why: str) -> Outcome:
    return Outcome("unsupported", {}, why)


FROM_MODELSCOPE = "the model comes from ModelScope: write `model.path: ms:OWNER/NAME`"


def from_modelscope() -> Outcome:
    """What another system takes as a switch is the beginning of a model's name."""
    return Outcome("built in", {}, FROM_MODELSCOPE, differs=True)


def as_path(key: str | KeyPath) -> KeyPath:
    return tuple(key.split(".")) if isinstance(key, str) else key


def value_as(config: Any, given: ForeignValue, ours: str) -> Outcome:
    """The same under another name, with a default that depends on whether the configuration is whole."""
    return mapped(ours, config.value(config.table.canonical(given.key)))


def below(config: Any, given: ForeignValue, section: str, ours: str) -> Outcome:
    """A value of `section` by its own name in a section of ours; null is not there."""
    if given.value is None:
        return built_in("null")
    names = config.table.canonical(given.key).removeprefix(f"{section}.").split(".")
    return mapped((*as_path(ours), *names), given.value)


def files(config: object, given: ForeignValue) -> str | list[str]:
    """Files as a recipe names them: one of them, or a list."""
    return one_or_all(given.value or [])


def run_name(config: object, given: ForeignValue) -> Outcome:
    """A conversion that all systems have: a run's name becomes that of a folder."""
    name = re.sub(r"[^\w.+=,-]+", "-", given.value or "").strip("-.+=,")
    if not name:
        raise ValueError("should name the run")
    return mapped("name", name) if name == given.value else converted({"name": name}, f"`{given.value}` as a folder")


def image_model(path: str | None) -> Literal["trained", "other"] | None:
    """Whether a model reads images, and Corral trains it with them. It is known by the end of its path, since rows need
    no key that says so: InternVL3-2B, GLM-4.1V-9B; a folder that is just called `vl` says nothing."""
    name = (path or "").rstrip("/").rpartition("/")[2]
    if IMAGE_MODEL.search(name):
        return "trained"
    return "other" if OTHER_IMAGE_MODEL.search(name) else None


def adapted_layers(config: object, given: ForeignValue) -> Outcome:
    """`all-linear`, or ends of names: a list, or a text with commas in it."""
    names = given.value.strip("[]") if isinstance(given.value, str) else given.value
    if names in (None, "all-linear"):
        return mapped("model.lora.targets", "all-linear")
    return mapped("model.lora.targets", [one.strip() for one in names.split(",")] if isinstance(names, str) else names)
