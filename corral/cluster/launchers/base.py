"""What every launcher is given, and what it returns."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from corral.recipe.schema import Recipe

Accelerator = Literal["nvidia", "amd", "none"]
"""none: worker slots on CPUs."""


@dataclass(frozen=True)
class Work:
    """What is to be started, and on how much."""

    recipe: Recipe
    file: Path
    overrides: tuple[str, ...] = ()
    accelerator: Accelerator = "nvidia"

    @property
    def name(self) -> str:
        """The run's, as launchers allow it: lower case, digits and dashes, from a letter on."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.recipe.name.lower()).strip("-")
        return plain if plain[:1].isalpha() else f"corral-{plain}".rstrip("-")

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


@dataclass(frozen=True)
class Launch:
    """Files to write, by name, and commands that start them, in order. Commands are lists: no shell reads them."""

    files: dict[str, str]
    commands: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = field(default=())
    """What the user must know or do first; printed after the files."""
