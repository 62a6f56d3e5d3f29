"""`torch`, imported when one of its functions is first called.

Declarations stand beside the functions that they declare, and whoever reads a recipe reads declarations. Importing
torch takes seconds, which `corral plan` and the processes that run reward functions should not spend.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _LazyTorch:
        def __getattr__(self, name: str) -> Any:
            found = getattr(import_module("torch"), name)
            setattr(self, name, found)  # the next access does not come here
            return found

    torch = _LazyTorch()
