"""Kernels are tested on a GPU where there is one, and in Triton's interpreter where there is none."""

import importlib.util
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def _loops_in_the_interpreter() -> None:
    """Triton 3.6 interprets `range(number of the kernel)` by a conversion that NumPy 2.4 refuses."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_fix(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_fix
