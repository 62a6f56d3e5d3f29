"""What every launcher is given, and what it returns."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from corral.recipe.errors import UserError
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
