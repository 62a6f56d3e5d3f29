"""A recipe, and what launchers are given of it."""

from pathlib import Path

from runs import write_recipe

from corral.cluster.launchers.launch_spec import Accelerator, LaunchSpec
from corral.recipe.load import load_recipe

HOSTILE = "name=Run $(touch no) `x` '; rm -rf & # {{y}} \u00fc"
"""An override that no shell and no YAML may take for anything but text; Corral takes it, as the name of a folder."""


def work(
    folder: Path, *overrides: str, accelerator: Accelerator = "nvidia", nodes: int = 2, devices: int = 8
) -> LaunchSpec:
    size = (f"cluster.nodes={nodes}", f"cluster.devices_per_node={devices}")
    recipe = write_recipe(folder, folder / "model")
    every = (*size, *overrides)
    return LaunchSpec(load_recipe(recipe, every), recipe, every, accelerator)
