"""Device memory whose address stays when the memory itself is given back: a captured graph goes on to hold after the
cache has made room for training and was taken again. (CUDA's virtual memory management, by the driver's functions.)"""

import ctypes
from typing import Any

import torch
from torch import Tensor


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _DEVICE, _READ_AND_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2


class HeldAddress:
    """A range of addresses on the device, behind which there is memory between `map` and `unmap`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.empty(1, device=device)  # the device's context exists from here on
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.location = _Location(_DEVICE, index)
        self.properties = _Properties(type=_PINNED, location=self.location)
        grain = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self.properties), 0)
        self.size = -(-num_bytes // grain.value) * grain.value
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
        """Takes the memory. What torch holds back for later is given up, if there is not enough otherwise."""
        handle = ctypes.c_uint64()
        create = ("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(self.size), ctypes.byref(self.properties))
        if self._try(*create, ctypes.c_uint64(0)) == _OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            self._call(*create, ctypes.c_uint64(0))
        whole = (self.address, ctypes.c_size_t(self.size))
        self._call("cuMemMap", *whole, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        access = _Access(self.location, _READ_AND_WRITE)
        self._call("cuMemSetAccess", *whole, ctypes.byref(access), ctypes.c_size_t(1))
        self.handle = handle

    def unmap(self) -> None:
        assert self.handle is not None, "there is no memory to give back"
        torch.cuda.synchronize(self.device)
        self._call("cuMemUnmap", self.address, ctypes.c_size_t(self.size))
        self._call("cuMemRelease", self.handle)
        self.handle = None

    def tensor(self) -> Tensor:
        """[num_bytes], uint8. To be read and written only while there is memory."""
        return torch.as_tensor(_Array(int(self.address.value), self.num_bytes), device=self.device)

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


class _Array:
    """Memory at an address, as torch takes it without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip
