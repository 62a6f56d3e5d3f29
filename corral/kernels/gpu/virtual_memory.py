"""Device memory whose address stays reserved while the memory itself is freed.

A captured CUDA graph contains addresses. The engine frees its KV cache while the trainer runs and takes it again later;
with an ordinary allocation it would come back at another address, and every graph would have to be captured again.
CUDA's virtual memory management separates the two: addresses are reserved once, physical memory is mapped and unmapped
behind them. torch has no function for that, so these are the driver's, by ctypes.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor


# CUmemLocation, CUmemAllocationProp and CUmemAccessDesc of cuda.h, field by field.
class _MemLocation(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _MemLocation),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _MemLocation), ("flags", ctypes.c_int))


_PINNED, _DEVICE, _READ_AND_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2


class VirtualBuffer:
    """A reserved range of device addresses, with physical memory behind it between `map` and `unmap`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.empty(1, device=device)  # creates the device's context, which the driver's functions need
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.location = _MemLocation(_DEVICE, index)
        self.properties = _AllocationProp(type=_PINNED, location=self.location)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self.properties), 0)
        self.size = -(-num_bytes // granularity.value) * granularity.value
        self.num_bytes = num_bytes
        address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(self.size), ctypes.c_size_t(0),
            ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        self.address = address
        self.handle: ctypes.c_uint64 | None = None
        self.device = device

    def map(self) -> None:
        """Allocates the memory and maps it. If there is too little, torch's cached blocks are freed first."""
        handle = ctypes.c_uint64()
        create = ("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(self.size), ctypes.byref(self.properties))
        if self._try(*create, ctypes.c_uint64(0)) == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            self._call(*create, ctypes.c_uint64(0))
        whole = (self.address, ctypes.c_size_t(self.size))
        self._call("cuMemMap", *whole, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        access = _AccessDesc(self.location, _READ_AND_WRITE)
        self._call("cuMemSetAccess", *whole, ctypes.byref(access), ctypes.c_size_t(1))
        self.handle = handle

    def unmap(self) -> None:
        assert self.handle is not None, "no memory is mapped"
        torch.cuda.synchronize(self.device)  # a kernel that still reads it would fault
        self._call("cuMemUnmap", self.address, ctypes.c_size_t(self.size))
        self._call("cuMemRelease", self.handle)
        self.handle = None

    def tensor(self) -> Tensor:
        """The memory as uint8 [num_bytes]. It may be read and written only while it is mapped."""
        return torch.as_tensor(_CudaArray(int(self.address.value), self.num_bytes), device=self.device)

    def close(self) -> None:
        if self.handle is not None:
            self.unmap()
        self._call("cuMemAddressFree", self.address, ctypes.c_size_t(self.size))

    def _try(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.driver, name)(*arguments))

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._try(name, *arguments)
        if code == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"no {self.size / 2**30:.1f} GiB of device memory are free for the cache")
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name} failed: {(text.value or b'?').decode()} ({code})")


def has_virtual_memory(device: torch.device) -> bool:
    """Whether the driver manages virtual memory, which some virtual GPUs, containers and old drivers do not. Found out
    by trying: not all that refuse it say so when they are asked."""
    try:
        buffer = VirtualBuffer(1, device)
        buffer.map()
        buffer.close()
    except (RuntimeError, OSError, AttributeError):  # refused, no such library, no such function
        return False
    return True


class _CudaArray:
    """Memory at an address in the form that torch wraps without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip
