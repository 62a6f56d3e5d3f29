"""What many tests need: a tiny random model with a character tokenizer, and a recipe that trains it in seconds."""

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# How long an example takes depends on what else the machine does.
settings.register_profile("corral", deadline=None)
settings.load_profile("corral")
sys.path.insert(0, str(Path(__file__).parent))
# Ray would start Python processes in advance for every run. Corral's actors, whose environment is their own, use none.
os.environ |= {"RAY_prestart_worker_first_driver": "false"}
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run without a GPU; read when transformers imports triton


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """A sixth of the time to import all tests would go to the garbage collector, though nothing of them is garbage; and
    each full collection after that would look at all of it again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two threads of a small matrix product are slower than one, and much slower when anything else runs."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face layout; the same weights in every run."""
    from tiny import save_tiny_model  # with transformers: the process of xdist that runs no test does without

    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder)
    return folder
