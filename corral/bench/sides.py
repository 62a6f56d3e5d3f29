"""Who is measured with whom, what each needs, and why one cannot be."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.bench.settings import Settings
from corral.bench.side import Tell
from corral.data.plugins import did_you_mean
from corral.recipe.errors import UserError


@dataclass(frozen=True)
class Side:
    function: str
    packages: tuple[str, ...] = ()
    """Beside Corral's own dependencies."""
    install: str = ""
    needs_gpu: bool = False


VLLM = "pip install vllm==0.25.1"
TRL = "pip install trl==1.16.0"
SIDES: dict[str, dict[str, Side]] = {
    "rollout": {
        "corral": Side("corral.bench.rollout:corral"),
        "transformers": Side("corral.bench.rollout:transformers"),
        "vllm": Side("corral.bench.rollout:vllm", ("vllm",), VLLM, needs_gpu=True),
    },
    "train": {
        "corral": Side("corral.bench.train:corral"),
        "transformers": Side("corral.bench.train:transformers"),
    },
    "step": {
        "corral": Side("corral.bench.step:corral"),
        "trl": Side("corral.bench.step:trl", ("trl", "datasets"), TRL),
    },
}


def chosen_sides(verb: str, wanted: Sequence[str] | None, device: str) -> list[str]:
    """In the order asked for; all that the device can run where nothing is asked for."""
    sides = SIDES[verb]
    if wanted is None:
        return [name for name, side in sides.items() if device == "cuda" or not side.needs_gpu]
    for name in wanted:
        if name not in sides:
            raise UserError(
                f"--sides {name}: not a side of `corral bench {verb}`, which has {', '.join(sides)}"
                f"{did_you_mean(name, sides)}"
            )
        if sides[name].needs_gpu and device != "cuda":
            raise UserError(f"--sides {name}: needs a GPU, and torch sees none here")
    return list(wanted)


def why_skipped(verb: str, name: str, device: str) -> str | None:
    """What is missing, and how to get it; None: nothing."""
    side = SIDES[verb][name]
    needed = dict.fromkeys(side.packages, side.install)
    if name == "trl" and device == "cuda":
        needed["vllm"] = VLLM
    missing = {package: install for package, install in needed.items() if importlib.util.find_spec(package) is None}
    if not missing:
        return None
    return f"{name} is skipped: {' and '.join(missing)} not installed ({'; '.join(dict.fromkeys(missing.values()))})"


def prepare(settings: Settings, tell: Tell) -> None:
    """In a process of its own, as all that touches the device is."""
    from corral.bench.models import make_shape

    tell.progress(f"writing random weights of {settings.model} to {settings.folder}, once")
    make_shape(settings.model, Path(settings.folder), settings.device, settings.dtype)
