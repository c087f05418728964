"""libcuda as a library: how its functions are found and called, and what their numbers say when they fail.

It is called by ctypes, from the table of signatures in cuda_abi.py, in every process alike. cuda-bindings and CuPy
call the same functions of the same library, but a foreign venv may have neither, and their enums, wrappers and return
values change between their major versions; one code path is the one that all tests prove. Where cuda-bindings is
installed, tests/gpu compares the numbers and structures with its own.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from ctypes import byref, c_char_p, c_int, c_uint64, c_void_p

from layerzero.ipc.cuda import abi
from layerzero.ipc.errors import CudaError

LIBRARY = "libcuda.so.1"


class Library:
    """Every method may raise CudaError."""

    def __init__(self, library: str) -> None:
        """Raises OSError when there is no such library."""
        self._library = ctypes.CDLL(library)
        self._functions: dict[str, Callable[..., int]] = {}

    def _bind(self, name: str) -> Callable[..., int]:
        try:
            function = getattr(self._library, name)
        except AttributeError as exc:
            raise CudaError(
                f"it lacks {name}; it is too old", call=name, number=abi.NEWER_DRIVER_NEEDED, name="", sticky=False
            ) from exc
        function.argtypes = abi.SIGNATURES[name]
        function.restype = c_int
        self._functions[name] = function
        return function  # type: ignore[no-any-return]

    def entries(self, names: Mapping[str, str] = abi.ENTRIES) -> dict[str, int]:
        """Addresses of the functions that C of ours calls, by its own names; none where the driver lacks one."""
        found = {own: getattr(self._library, name, None) for own, name in names.items()}
        if None in found.values():
            return {}
        return {own: ctypes.cast(function, c_void_p).value or 0 for own, function in found.items()}  # type: ignore[arg-type]

    def _code(self, name: str, *arguments: object) -> int:
        return (self._functions.get(name) or self._bind(name))(*arguments)

    def _call(self, name: str, *arguments: object) -> None:
        number = (self._functions.get(name) or self._bind(name))(*arguments)  # not by _code: this is every call's path
        if number:
            raise self._error(name, number)

    def _is_ready(self, name: str, handle: int) -> bool:
        number = self._code(name, handle)
        if number not in (0, abi.NOT_READY):
            raise self._error(name, number)
        return number == 0

    def error_of(self, call: str, number: int) -> CudaError:
        """What a function that C of ours has called returned, as the error that it would have been here."""
        return self._error(call, number)

    def _error(self, call: str, number: int) -> CudaError:
        text = c_char_p()
        with contextlib.suppress(CudaError):  # without a name the number is enough
            self._code("cuGetErrorName", number, byref(text))
        name = (text.value or b"").decode(errors="replace")
        return CudaError(
            f"{call} returned {number}" + (f" ({name})" if name else ""),
            call=call,
            number=number,
            name=name,
            sticky=number in abi.STICKY,
        )

    def _handle(self, name: str, *arguments: object) -> int:
        made = c_void_p()
        self._call(name, byref(made), *arguments)
        return made.value or 0

    def _u64(self, name: str, *arguments: object) -> int:
        made = c_uint64()
        self._call(name, byref(made), *arguments)
        return made.value

    def _int(self, name: str, *arguments: object) -> int:
        found = c_int()
        self._call(name, byref(found), *arguments)
        return found.value
