"""Loads and launches code objects on an AMD GPU through the HIP runtime, by ctypes."""

from __future__ import annotations

import ctypes
import ctypes.util
import threading
from functools import lru_cache

from .attention import Launch
from .cache import code_object

_ARG_POINTER, _ARG_SIZE, _ARG_END = (ctypes.c_void_p(n) for n in (1, 2, 3))


class HipError(RuntimeError):
    """The HIP runtime is absent, or a call into it failed; the message names the call."""


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    for name in ("libamdhip64.so", ctypes.util.find_library("amdhip64")):
        if name:
            try:
                library = ctypes.CDLL(name)
            except OSError:
                continue
            library.hipGetErrorString.restype = ctypes.c_char_p
            return library
    raise HipError("the HIP runtime (libamdhip64.so) is not installed; kernels run on the emulator only")


def call(function: str, *arguments) -> None:
    """Call a HIP function that returns an error code."""
    library = _library()
    code = getattr(library, function)(*arguments)
    if code:
        raise HipError(f"{function}: {library.hipGetErrorString(code).decode()} ({code})")


class Module:
    """A loaded code object; `function` finds its kernel."""

    def __init__(self, code: bytes) -> None:
        self._code = ctypes.create_string_buffer(code, len(code))  # the runtime may read it later
        self._module = ctypes.c_void_p()
        call("hipModuleLoadData", ctypes.byref(self._module), self._code)

    def function(self, symbol: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        call("hipModuleGetFunction", ctypes.byref(function), self._module, symbol.encode())
        return function


_functions: dict[tuple[int, str], ctypes.c_void_p] = {}
_modules: list[Module] = []
_lock = threading.Lock()


def _function(launch: Launch) -> ctypes.c_void_p:
    device = ctypes.c_int()
    call("hipGetDevice", ctypes.byref(device))
    key = (device.value, launch.kernel)
    with _lock:
        if key not in _functions:
            module = Module(code_object(launch.kernel))
            _modules.append(module)
            _functions[key] = module.function(launch.symbol)
        return _functions[key]


def run(launch: Launch, stream: int = 0) -> None:
    """Enqueue a launch on the current device. `stream` is a hipStream_t as an integer (torch: `stream.cuda_stream`)."""
    function = _function(launch)
    block = ctypes.create_string_buffer(launch.kernarg, len(launch.kernarg))
    size = ctypes.c_size_t(len(launch.kernarg))
    extra = (ctypes.c_void_p * 5)(
        _ARG_POINTER,
        ctypes.cast(block, ctypes.c_void_p),
        _ARG_SIZE,
        ctypes.cast(ctypes.byref(size), ctypes.c_void_p),
        _ARG_END,
    )
    call(
        "hipModuleLaunchKernel",
        function,
        *(ctypes.c_uint(n) for n in launch.grid),
        *(ctypes.c_uint(n) for n in (launch.block, 1, 1)),
        ctypes.c_uint(0),
        ctypes.c_void_p(stream),
        None,
        extra,
    )


class Buffer:
    """Device memory, freed with the object."""

    def __init__(self, nbytes: int) -> None:
        self.address, self.nbytes = 0, nbytes
        pointer = ctypes.c_void_p()
        call("hipMalloc", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)))
        self.address = pointer.value or 0

    def write(self, data: bytes) -> None:
        call("hipMemcpy", ctypes.c_void_p(self.address), data, ctypes.c_size_t(len(data)), 1)

    def read(self) -> bytes:
        out = ctypes.create_string_buffer(self.nbytes)
        call("hipMemcpy", out, ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes), 2)
        return out.raw

    def __del__(self) -> None:
        if self.address:
            _library().hipFree(ctypes.c_void_p(self.address))


def synchronize() -> None:
    call("hipDeviceSynchronize")
