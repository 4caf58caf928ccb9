"""The calls of CUDA's runtime that torch has no name for. torch has loaded the library; here it is called by ctypes,
which lets other threads run."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

from kvstore.errors import Internal
from kvstore_client.arrays import torch_module

REGISTER_PORTABLE, REGISTER_READ_ONLY = 1, 8
TO_DEVICE, TO_HOST = 1, 2
PITCH_MAX = (1 << 31) - 1
"""The longest distance of two rows that CUDA takes."""


class Runtime:
    """CUDA's runtime library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self._register = library.cudaHostRegister
        self._register.argtypes = [address, size, ctypes.c_uint]
        self._unregister = library.cudaHostUnregister
        self._unregister.argtypes = [address]
        self._copy = library.cudaMemcpy2DAsync
        self._copy.argtypes = [address, size, address, size, size, size, ctypes.c_int, address]
        self._forget = library.cudaGetLastError
        self._name = library.cudaGetErrorString
        self._name.restype = ctypes.c_char_p

    def register(self, address: int, byte_count: int, flags: int) -> str:
        """Register memory of this process for copies by every GPU. Returns the reason why not; "" where it is.
        Cost: about 50 ms per GiB, once."""
        code = self._register(address, byte_count, flags)
        if code:
            self._forget()  # torch would find the error, and take it for one of its own calls
        return self._reason(code)

    @property
    def gpu(self) -> int:
        """The number of the GPU that this thread has chosen."""
        return int(torch_module().cuda.current_device())

    def unregister(self, address: int, gpu: int) -> None:
        """Take a registration back, on the GPU on which it was made: any thread may be the one that unmaps the memory,
        and in one that has chosen no GPU, CUDA would make a context on the first one, of some 500 MiB. Fails only where
        CUDA has ended."""
        with suppress(RuntimeError), torch_module().cuda.device(gpu):
            if self._unregister(address):
                self._forget()

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, count: int, direction: int,
        stream: int,
    ) -> None:  # fmt: skip
        """Queue the copy of ``count`` rows of ``width`` bytes each. Raises Internal where CUDA refuses it."""
        code = self._copy(target, target_pitch, source, source_pitch, width, count, direction, stream)
        if code:
            self._forget()
            raise Internal(f"a copy between the sidecar's memory and the GPU failed: {self._reason(code)}")

    def _reason(self, code: int) -> str:
        return f"{self._name(code).decode()} (CUDA error {code})" if code else ""


@cache
def runtime() -> Runtime | None:
    """Return the runtime that torch uses; None where torch has none, or brings it in another way: torch's own calls
    then make the copies."""
    torch = torch_module()
    version = None if torch is None else torch.version.cuda
    if version is None:
        return None
    try:
        return Runtime(ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}"))
    except (OSError, AttributeError):
        return None
