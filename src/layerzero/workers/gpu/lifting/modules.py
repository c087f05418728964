"""Machine code that this process loads, as CUPTI shows it. To be watched before a library loads any.

A module is known by what the driver was asked when it came: compilers give many kernels one name, and which of them a
function is, its module says. CUPTI allows one subscriber in a process: under a profiler there is none for us.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import CFUNCTYPE, POINTER, byref, c_int, c_size_t, c_uint32, c_void_p
from typing import Any

from layerzero.ipc.lifting.form import digest

VARIABLE = "LAYERZERO_CUPTI"  # the library's path
# Where wheels have it, below an entry of sys.path, and where toolkits do.
_IN_WHEELS = ("nvidia/*/lib/libcupti.so*", "nvidia/cuda_cupti/lib/libcupti.so*")
_IN_TOOLKITS = (
    "/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so*",
    "/usr/local/cuda*/lib64/libcupti.so*",
    "/usr/local/cuda*/targets/*/lib/libcupti.so*",
)
_CALLS, _RESOURCES = 1, 3  # CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_CB_DOMAIN_RESOURCE
_MODULE_LOADED = 6  # CUPTI_CBID_RESOURCE_MODULE_LOADED
# CUPTI_DRIVER_TRACE_CBID: cuModuleLoad, cuModuleLoadData, ...Ex, cuModuleLoadFatBinary, which say where to put the new
# module; cuModuleGetFunction(where, module, name), at which modules come that are loaded when they are used.
_LOADS, _GET_FUNCTION = frozenset({18, 19, 20, 21}), 23
_SECTION = re.compile(rb"\.text\.([^\0]+)\0")  # each kernel's code is a section of its own
_Callback = CFUNCTYPE(None, c_void_p, c_int, c_uint32, c_void_p)


class _Resource(ctypes.Structure):
    """CUpti_ResourceData."""

    _fields_ = [("context", c_void_p), ("handle", c_void_p), ("descriptor", c_void_p)]


class _Module(ctypes.Structure):
    """CUpti_ModuleResourceData."""

    _fields_ = [("id", c_uint32), ("nbytes", c_size_t), ("image", c_void_p)]


class _Seen(threading.local):
    """What came in this thread since its call began."""

    def __init__(self) -> None:
        self.codes: list[str] = []


class _Call(ctypes.Structure):
    """The beginning of CUpti_CallbackData."""

    _fields_ = [
        ("is_exit", c_int),
        ("name", c_void_p),
        ("params", POINTER(c_void_p)),
        ("result", POINTER(c_int)),
    ]


class Modules:
    """Every module that was loaded, each once, the last one last."""

    def __init__(self, problem: str = "") -> None:
        """`problem`: why none will be seen, if that is so."""
        self.problem = problem
        self._images: dict[str, bytes] = {}  # by digest
        self._names: dict[str, frozenset[bytes]] = {}  # of the kernels of those that were looked into
        self._by_handle: dict[int, list[str]] = {}
        self._seen = _Seen()
        self._kept: object = None  # what CUPTI calls

    def add(self, image: bytes) -> None:
        name = digest(image)
        self._images[name] = self._images.pop(name, image)
        self._seen.codes.append(name)

    def image(self, code: str) -> bytes:
        """By its digest."""
        return self._images[code]

    def find(self, kernel: str, module: int) -> str | None:
        """The digest of the code of a kernel whose module has this handle. Of modules that came unasked it is the last
        one with that name."""
        name = kernel.encode(errors="replace")
        for codes in (self._by_handle.get(module, ()), self._images):
            for code in reversed(list(codes)):
                if name in self._kernels(code):
                    return code
        return None

    def _kernels(self, code: str) -> frozenset[bytes]:
        if code not in self._names:
            self._names[code] = frozenset(_SECTION.findall(self._images[code]))
        return self._names[code]

    def subscribe(self, cupti: Any) -> str:
        """See what is loaded from now on. Returns why that cannot be, or ""."""

        def on_event(user: int, domain: int, which: int, data: int) -> None:
            try:
                if domain == _CALLS:
                    with contextlib.suppress(ValueError):  # null pointers
                        self._note_call(which, ctypes.cast(data, POINTER(_Call)).contents)
                elif (domain, which) == (_RESOURCES, _MODULE_LOADED):
                    resource = ctypes.cast(data, POINTER(_Resource)).contents
                    module = ctypes.cast(resource.descriptor, POINTER(_Module)).contents
                    if module.image and module.nbytes:
                        self.add(ctypes.string_at(module.image, module.nbytes))
            except BaseException as exc:  # the driver called: nobody above would take it
                self.problem = f"machine code was missed: {type(exc).__name__}: {exc}"[:500]

        subscriber, callback = c_void_p(), _Callback(on_event)
        number = cupti.cuptiSubscribe(byref(subscriber), callback, None)
        if number:
            return f"cuptiSubscribe returned {number}: a profiler may have taken it"
        self._kept = (cupti, subscriber, callback)
        number = cupti.cuptiEnableDomain(1, subscriber, _RESOURCES)
        if number:
            cupti.cuptiUnsubscribe(subscriber)
            return f"cuptiEnableDomain returned {number}"
        for which in (*_LOADS, _GET_FUNCTION):  # without them modules are known by their kernels' names
            cupti.cuptiEnableCallback(1, subscriber, _CALLS, which)
        return ""

    def _note_call(self, which: int, call: _Call) -> None:
        """Modules that come during a call of the driver are those of the handle that it is about."""
        if not call.is_exit:
            self._seen.codes = []
            return
        codes, self._seen.codes = self._seen.codes, []
        if call.result[0]:
            return
        if which in _LOADS:
            self._by_handle[ctypes.cast(call.params[0], POINTER(c_void_p))[0] or 0] = codes
        elif codes:
            self._by_handle.setdefault(call.params[1] or 0, []).extend(codes)


def watch(
    environ: Mapping[str, str] = os.environ,
    paths: Sequence[str] | None = None,
    load: Callable[[str], Any] = ctypes.CDLL,
    into: Modules | None = None,
) -> Modules:
    """See every module that is loaded from now on, in `into` where that is given. Where that cannot be, `problem` says
    why."""
    modules, said = Modules() if into is None else into, []
    modules.problem = ""
    for library in find(environ, sys.path if paths is None else paths):
        try:
            problem = modules.subscribe(load(library))
        except (OSError, AttributeError) as exc:
            problem = str(exc)
        if not problem:
            return modules
        said.append(f"{library}: {problem}")
    modules.problem = "; ".join(said)[:1000] or (
        f"no libcupti: neither on sys.path (wheel nvidia-cuda-cupti) nor in /usr/local/cuda*; {VARIABLE} may name one"
    )
    return modules


def find(environ: Mapping[str, str], paths: Iterable[str]) -> list[str]:
    """Libraries to try, those first that belong to the environment's own libraries. Each file once."""
    if environ.get(VARIABLE):
        return [environ[VARIABLE]]
    patterns = [f"{glob.escape(path)}/{place}" for path in paths if path for place in _IN_WHEELS]
    found = [file for pattern in (*patterns, *_IN_TOOLKITS) for file in sorted(glob.glob(pattern), reverse=True)]
    return list(dict.fromkeys(map(os.path.realpath, found)))
