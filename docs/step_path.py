"""Counts the files on the path of a training step: `python docs/step_path.py`.

Trains a model of a million parameters for two steps in this process, on a CPU, and prints how many modules of Corral
were imported by then, and in how many of them a function ran during the second step.
"""

import contextlib
import io
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

RECIPE = """
name: step-path
model: {path: blank-1m}
data:
  train: {path: "arithmetic:addition", size: 64, options: {digits: 1}}
  chat: false
environment: {reward: {name: REWARD}}
rollout: {max_response_tokens: 8}
batch: {prompts_per_step: 4, samples_per_prompt: 4}
schedule: {steps: 2}
checkpoint: {at_end: false}
logging: {trajectories: false}
"""


def main() -> None:
    import corral

    package = Path(corral.__file__).parent
    ran: set[str] = set()
    watch = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal watch
        name = frame.f_code.co_filename
        if not name.startswith(str(package)):
            return
        if event == "return" and frame.f_code.co_name == "record_step":
            watch = not watch  # from the end of the first step, when caches are warm, to the end of the second
        if event == "call" and watch and frame.f_code.co_name != "<module>":
            ran.add(name)

    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        reward = Path(folder) / "reward.py"
        reward.write_text("def score(response: str) -> float:\n    return len(response.split()) % 2\n")
        recipe.write_text(RECIPE.replace("REWARD", f"{reward}:score"))
        from corral.cli.main import app

        threading.setprofile(profile)
        sys.setprofile(profile)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            app(["train", str(recipe), f"logging.runs={folder}"])
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    imported = [name for name, module in sys.modules.items() if name.startswith("corral.") and is_file(module)]
    paths = sorted(str(Path(name).relative_to(package.parent)) for name in ran)
    print("\n".join(paths))
    print(f"{len(imported)} modules imported by `corral train`, {len(paths)} of them on the path of a step")


def is_file(module: Any) -> bool:
    """Whether it is a module with something in it, and not an empty package."""
    path = getattr(module, "__file__", None)
    return bool(path) and bool(Path(path).read_text().strip())


if __name__ == "__main__":
    main()
