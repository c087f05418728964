"""The in-process lane: a backend's provider in this very interpreter, for stacks that agree.

A backend is tried first in a throw-away process of the same interpreter, with the array libraries imported that this
process has: what crashes or computes wrongly there never gets near the caller. Until that probe has passed, and for
good when it fails, calls go to the backend's worker. As in a worker, a backend runs one call at a time.

On a GPU (on_gpu.py) a backend is probed on the GPU of the call, and its libraries must have the versions that its own
environment has.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from layerzero.client.connection.call import Refusal
from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.cuda.abi import CAPTURE_RELAXED
from layerzero.ipc.transport.plain import pack_body
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.shape_class import class_dtype, shape_class
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.boot import import_provider
from layerzero.workers.provider import Bind, Block, Bound, Call, Loaded

PROBE_TIMEOUT_S = 120.0
MAX_BOUND = 64  # calls kept bound per route
Place = tuple[int, int]
"""Address and bytes."""
# Libraries that disagree with others when both are in one process; those that are here are imported in the probe too.
_NEIGHBOURS = ("numpy", "torch", "jax", "mlx", "onnxruntime", "tensorflow", "google.protobuf")
_ABI_SIGNS = ("undefined symbol", "ABI version", "size changed", "compiled using NumPy", "cannot open shared object")
_PROBE = """
import importlib, sys
for name in filter(None, sys.argv[1].split(",")):
    importlib.import_module(name)
from layerzero.workers import probe
sys.exit(probe.main(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Grant:
    """The broker's word that calls may run here. `provider` and `descriptor` are of the backend's manifest. `gpu`: its
    UUID, empty for the CPU. `versions`: which libraries it must have here."""

    backend: str
    provider: str
    descriptor: str
    gpu: str = ""
    versions: tuple[tuple[str, str], ...] = ()


_NOT_YET = Refusal("its probe in this interpreter has not ended yet", False)


@dataclass(eq=False)
class Backend:
    """One that policy wants here, on one device. `loaded` once it may run here; `refusal` says why not (yet). `failed`:
    kernel id, dtype and shape class of what the probe found wrong here."""

    loaded: Loaded | None = None
    refusal: Refusal = _NOT_YET
    failed: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while one of its kernels runs


@dataclass(eq=False)
class Lane:
    """The backends of one session that may run in this process, each on the CPU or on one GPU. Threads may share it."""

    _backends: dict[tuple[str, str], Backend] = field(default_factory=dict)
    _loaded: dict[tuple[str, str], Loaded] = field(default_factory=dict)  # by provider and GPU, whose streams they keep
    _locks: dict[str, threading.Lock] = field(default_factory=dict)  # of backends, whatever their devices
    _kernels: dict[str, str] = field(default_factory=dict)  # single kernels that stay out, and why
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _load_lock: threading.Lock = field(default_factory=threading.Lock)

    def runner(self, grant: Grant, call: Call) -> Runner | Refusal:
        """What runs a route's calls here, on the CPU. Starts the backend's probe the first time; never waits for it."""
        found = self.find(grant, call)
        return found if isinstance(found, Refusal) else Runner(call, *found[:2])

    def find(self, grant: Grant, call: Call) -> tuple[Bind, threading.Lock, Loaded] | Refusal:
        """The call's kernel, what is to be held while it runs, and whence it comes. As `runner`."""
        key = (grant.backend, grant.gpu)
        backend = self._backends.get(key)
        if backend is None:
            with self._lock:
                backend = self._backends.get(key)
                if backend is None:
                    lock = self._locks.setdefault(grant.backend, threading.Lock())
                    backend = self._backends[key] = Backend(lock=lock)
                    threading.Thread(
                        target=self._prepare, args=(backend, grant), name=f"probe-{grant.backend}", daemon=True
                    ).start()
        if backend.loaded is None:
            return backend.refusal
        dtype, kind = class_dtype(call.op, call.inputs), shape_class(call.op, call.inputs, call.attrs, call.outputs)
        wrong = backend.failed.get((call.kernel_id, dtype, kind))
        if wrong is not None:
            self._kernels[call.kernel_id] = f"its probe in this interpreter failed on {kind} in {dtype}: {wrong}"
            return Refusal(self._kernels[call.kernel_id], True)
        bind = backend.loaded.kernels.get(call.kernel_id)
        if bind is None:
            return Refusal(f"its provider has no kernel {call.kernel_id} here", True)
        return bind, backend.lock, backend.loaded

    def is_settled(self, backend: str, gpu: str) -> bool:
        """Whether it is known if the backend runs here."""
        found = self._backends.get((backend, gpu))
        return found is None or found.loaded is not None or found.refusal.is_final

    def refuse(self, backend: str, why: str, gpu: str = "") -> None:
        """Never again in this process: it failed in a way that other calls would share."""
        self._backends[backend, gpu] = Backend(None, Refusal(why, True))

    def stays_out(self, backend: str) -> bool:
        """Whether it is known that it will never run here, on the CPU."""
        found = self._backends.get((backend, ""))
        return found is not None and found.loaded is None and found.refusal.is_final

    def refusals(self) -> dict[str, str]:
        """Backends, and single kernels, that policy wants here and that stay out for good, with the reason."""
        backends = list(self._backends.items())
        out = {name: one.refusal.why for (name, _), one in backends if one.loaded is None and one.refusal.is_final}
        return {**out, **self._kernels}

    def _prepare(self, backend: Backend, grant: Grant) -> None:
        try:
            failed = _probe(grant)
            if isinstance(failed, str):
                backend.refusal = Refusal(failed, True)
                return
            with self._load_lock:
                where = (grant.provider, grant.gpu)
                loaded = self._loaded.get(where)
                if loaded is None:
                    loaded = self._loaded[where] = _load_on(grant)
        except Exception as exc:  # any library may raise anything on import
            backend.refusal = Refusal(f"it does not load here: {type(exc).__name__}: {exc}", True)
            return
        if grant.gpu and loaded.on_stream is None:
            backend.refusal = Refusal("its kernels compute on the CPU here", True)
            return
        backend.failed = failed
        backend.loaded = loaded  # last: from now on calls run here


def _probe(grant: Grant) -> dict[tuple[str, str, str], str] | str:
    """Run the backend's probe under this interpreter in a process of its own. Returns what it found wrong, by kernel
    id, dtype and shape class; or why the whole backend does not work here."""
    neighbours = ",".join(name for name in _NEIGHBOURS if name in sys.modules)
    argv = [sys.executable, "-c", _PROBE, neighbours, grant.provider, grant.descriptor, str(os.getpid())]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if grant.gpu:
        environ["CUDA_VISIBLE_DEVICES"] = grant.gpu  # the probe takes the first that it sees
    try:
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its probe did not end within {PROBE_TIMEOUT_S:g} s"
    except OSError as exc:
        return f"its probe could not be started: {exc}"
    last = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        verdict = json.loads(last)
    except ValueError:
        verdict = None
    if not isinstance(verdict, dict):
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        words = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"its probe ended with {how}: {words:.300}"
    if verdict.get("ok") is True:
        has = verdict["versions"]
        others = [f"{name} {has.get(name)}, not {wanted}" for name, wanted in grant.versions if has.get(name) != wanted]
        if others:
            return f"this process has other versions than its environment: {', '.join(others)}"
        return {(f["kernel_id"], f["dtype"], f["shape_class"]): f["detail"] for f in verdict["failures"]}
    error = verdict.get("error")
    return f"its probe says: {error.get('message') if isinstance(error, dict) else error}"


def _load_on(grant: Grant) -> Loaded:
    """As `_load`, for a backend of a GPU: with that one current, and without harm to captures of the application."""
    if not grant.gpu:
        return _load(grant.provider)
    driver = cuda.load()
    driver.exchange_capture_mode(CAPTURE_RELAXED)  # for good: this thread does nothing else
    with cuda.Context(driver, grant.gpu):
        return _load(grant.provider)


def _load(provider: str) -> Loaded:
    """Load the provider; a library's global switches are put back, they belong to the application."""
    torch = sys.modules.get("torch")
    grad = torch.is_grad_enabled() if torch is not None else True
    try:
        return import_provider(provider).load()
    finally:
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_grad_enabled(grad)


class _Thread(threading.local):
    """`is_running`: a kernel runs in it just now. What it calls is its own, and not to be taken over."""

    is_running = False


thread = _Thread()


class Runner:
    """Runs one route's calls here, with the blocks of earlier calls kept bound."""

    def __init__(self, call: Call, bind: Bind, lock: threading.Lock) -> None:
        self._call = call
        self._bind = bind
        self._lock = lock
        self._is_sized = OPS[call.op].sized_output
        self._bound: OrderedDict[tuple[Place | None, ...], Bound] = OrderedDict()

    def run(self, inputs: Sequence[Place | None], outputs: Sequence[Place]) -> tuple[int, bytes]:
        """Returns the kernel's time in ns and what it returned, packed as a worker does. The caller keeps the memory
        alive. Raises what the kernel raises."""
        key = (*inputs, *outputs)
        with self._lock:
            thread.is_running = True
            try:
                bound = self._bound.get(key)
                if bound is None:
                    bound = self._bound[key] = self._bind(self._call, *self._blocks(inputs, outputs))
                    if len(self._bound) > MAX_BOUND:
                        self._bound.popitem(last=False)
                start_ns = time.perf_counter_ns()
                result = bound()
                elapsed_ns = time.perf_counter_ns() - start_ns
            finally:
                thread.is_running = False
        return elapsed_ns, b"" if result is None else pack_body(result)

    def _blocks(
        self, inputs: Sequence[Place | None], outputs: Sequence[Place]
    ) -> tuple[list[Block | None], list[Block]]:
        sources = [
            None if place is None or spec is None else self._block(place, spec, writable=False)
            for place, spec in zip(inputs, self._call.inputs, strict=True)
        ]
        targets = [
            self._block(place, spec, writable=True) for place, spec in zip(outputs, self._call.outputs, strict=True)
        ]
        return sources, targets

    def _block(self, place: Place, spec: TensorSpec, *, writable: bool) -> Block:
        address, nbytes = place
        if self._is_sized:  # the leading extent is as long as the bytes given
            row = spec.itemsize * math.prod(spec.shape[1:])
            spec = TensorSpec.contiguous(spec.dtype, (nbytes // row, *spec.shape[1:]))
        view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        return Block(view if writable else view.toreadonly(), spec)


def is_abi_failure(exc: BaseException) -> bool:
    """Whether libraries of this process do not fit together: then no other call will fare better here."""
    if isinstance(exc, (ImportError, OSError)):
        return True
    text = str(exc)
    return any(sign in text for sign in _ABI_SIGNS)
