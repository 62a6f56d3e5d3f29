"""What every launcher is given, and what it returns."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from corral.cluster.jobs.job_code import absolute_paths, changed, code_specs, collect_code
from corral.recipe.errors import UserError
from corral.recipe.keys import dotted
from corral.recipe.memory import human_bytes
from corral.recipe.schema import Recipe

Accelerator = Literal["nvidia", "amd", "none"]
"""none: worker slots on CPUs."""


@dataclass(frozen=True)
class LaunchSpec:
    """What is to be started, and on how many devices."""

    recipe: Recipe
    file: Path
    overrides: tuple[str, ...] = ()
    accelerator: Accelerator = "nvidia"
    code: Mapping[str, str] = field(default_factory=dict)
    """Texts that are sent with the recipe, by their path in the folder in which it is trained."""

    @property
    def name(self) -> str:
        """The run's name, as launchers allow it: lower case, digits and dashes, beginning with a letter."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.recipe.name.lower()).strip("-")
        return plain if plain[:1].isalpha() else f"corral-{plain}".rstrip("-")

    def short_name(self, longest: int) -> str:
        """The name with at least two characters, which most launchers need, and no more than they allow."""
        return (self.name if len(self.name) > 1 else f"corral-{self.name}")[:longest].rstrip("-")

    @property
    def num_nodes(self) -> int:
        return self.recipe.cluster.nodes

    @property
    def devices_per_node(self) -> int:
        return self.recipe.cluster.devices_per_node

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def train_command(self) -> list[str]:
        return ["corral", "train", str(self.file), *self.overrides]

    def up_command(self, *options: str) -> list[str]:
        """`corral up`, with the number of worker slots on nodes without GPUs."""
        devices = ["--devices", str(self.devices_per_node)] if self.accelerator == "none" else []
        return ["corral", "up", *options, *devices]


@dataclass(frozen=True)
class LaunchFiles:
    """Files to write, by name, and commands that start them, in order. Commands are lists: no shell reads them."""

    files: dict[str, str]
    commands: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()  # what the user must know or do first; printed after the files


def with_code(spec: LaunchSpec, folder: Path, root: Path | None, include: Sequence[str], max_bytes: int) -> LaunchSpec:
    """For nodes that do not see this machine's files: the code that the recipe names is sent, as `corral submit` sends
    it, and a path of this machine is refused. `root`: folder of the code; None: the image has it."""
    recipe, code = spec.recipe, dict[str, str]()
    for key, path in absolute_paths(recipe, folder).items():
        if key == ("model", "chat_template"):
            recipe = changed(recipe, {key: path})  # its text
        elif key != ("logging", "runs") and path != (written := value_at(recipe, key)):
            raise UserError(
                f"`{dotted(key)}: {written}` is relative to a folder of this machine, which the nodes do not have: put "
                "it on a volume that they mount, and write its path there"
            )
    if root is not None and (include or code_specs(recipe)):
        recipe, found = collect_code(recipe, folder, root, include)
        for name, file in found.files.items():
            try:
                code[name] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                raise UserError(f"{file} is not text, and only text is sent: put it into the image") from None
        if found.num_bytes > max_bytes:
            raise UserError(
                f"{len(code)} files of code of {root} are {human_bytes(found.num_bytes)}, and at most "
                f"{human_bytes(max_bytes)} are sent along: choose a smaller folder with --code DIR, or put the code "
                "into the image and send none with --no-code"
            )
    return replace(spec, recipe=recipe, code=code)


def value_at(recipe: Recipe, key: Sequence[str]) -> Any:
    value: Any = recipe
    for name in key:
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def check_run_folder(recipe: Recipe, kept: Sequence[str], option: str) -> None:
    """Raises if checkpoints would be on a disk that goes with its container. `kept`: paths where something is mounted
    that stays; `option`: how one is given."""
    runs = Path(recipe.logging.runs)
    if not any(runs.is_relative_to(path) for path in kept):
        raise UserError(
            f"the run folder {runs / recipe.name} would be on a container's own disk, and be lost with it: mount a "
            f"volume that stays and name a folder of it, {option} logging.runs=/runs"
        )


def check_names_only(environment: Sequence[str]) -> None:
    """Raises if a variable is given with its value, which would be written down."""
    for variable in environment:
        if "=" in variable:
            name = variable.partition("=")[0]
            raise UserError(f"--env {name}=...: give the name alone; its value is taken from the environment")


class BlockTextDumper(yaml.SafeDumper):
    """Writes scripts and recipes inside of a document as blocks, so that they stay readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


BlockTextDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def yaml_text(*documents: Any) -> str:
    return yaml.dump_all(documents, Dumper=BlockTextDumper, sort_keys=False, allow_unicode=True, width=100)
