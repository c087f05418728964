"""lz.connect and what belongs to it: the default session, shared memory, reports, futures."""

from __future__ import annotations

import asyncio
import difflib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import layerzero
from layerzero.client.arrays.array_types import ArrayT
from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import CPU, Array, describe
from layerzero.client.arrays.wrapping import wrap
from layerzero.client.connection import arena as arenas
from layerzero.client.connection import overlay, settings_check
from layerzero.client.connection import start as starting
from layerzero.client.connection.call import Request, Submitted
from layerzero.client.connection.record import Record
from layerzero.client.connection.report import SelectionReport
from layerzero.client.facade import ops
from layerzero.client.gpu.arrays import give, is_on_gpu, new_like
from layerzero.client.gpu.outcomes import Enqueued
from layerzero.client.session.session import Session
from layerzero.ipc.errors import BrokerLost, InvalidArgument, LayerZeroError, NotConnected
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, TensorSpec

if TYPE_CHECKING:
    from numpy import dtype as NumPyDtype
    from numpy import float32, generic
    from numpy.typing import NDArray

    ScalarT = TypeVar("ScalarT", bound=generic)

T = TypeVar("T")
_session: Session | None = None
_lock = threading.Lock()
ENDING_POLL_S = 0.1


def connect(
    *,
    runtime_dir: str | os.PathLike[str] | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    start: bool | None = None,
) -> Session:
    """Connect this process to the user's broker, starting one if none runs.

    A broker started here ends with its last client; `lz up` starts one that stays. Calling again returns the same
    session while its broker lives, and a new one after it was lost. All threads share the session; a forked child
    connects anew at its first call.
    runtime_dir: folder of the broker's sockets; default LAYERZERO_RUNTIME_DIR or the platform's runtime folder.
    secret_file: the secret of a broker that asks for one (lz keys secret); default LAYERZERO_SECRET_FILE.
    start: whether to start a broker where none runs, in place of waiting for one; default: unless there is a secret
    file, for then the broker is another container's.
    Raises BrokerLost when no broker can be started, VersionMismatch when one of another version runs.
    """
    global _session
    key = starting.secret_key(None if secret_file is None else Path(secret_file))
    where = starting.endpoints(None if runtime_dir is None else Path(runtime_dir), is_shared=key is not None)
    starts = key is None if start is None else start
    with _lock:
        if _session is not None:
            if _session.is_alive and _session.path == where.control:
                return _session
            _session.close()
            _session = None
        deadline_s = time.monotonic() + starting.START_TIMEOUT_S
        while True:
            is_ours = starts and starting.ensure_broker(where, stays=False)
            overlay.set_environment(starting.policy_layers())
            try:
                _session = Session(where.control, layerzero.__version__, key)
                break
            except TimeoutError as exc:
                raise BrokerLost(f"the broker on {where.control} does not answer; end it with lz down") from exc
            except (FileNotFoundError, ConnectionRefusedError, BrokerLost) as exc:
                if time.monotonic() > deadline_s:
                    raise BrokerLost(f"no broker answers on {where.control}: {exc}") from exc
                if starts:  # the last client left just now, and the broker with it
                    starting.wait_for_end(where, ENDING_POLL_S)
                else:
                    time.sleep(ENDING_POLL_S)
        settings_check.warn_of_variables()
        if not is_ours and key is None:  # one that has a secret is started with settings of its own, elsewhere maybe
            settings_check.warn_of_broker(_session)
        return _session


def disconnect() -> None:
    """Close the session. A broker that lz.connect() started ends when its last client has left."""
    global _session
    with _lock:
        if _session is not None:
            _session.close()
            _session = None


def session() -> Session:
    """The session of lz.connect(). Raises NotConnected."""
    current = _session
    if current is None:
        raise NotConnected("not connected; call lz.connect() first")
    return current


def last_report() -> SelectionReport:
    """Of this thread's last call: which kernel, what it cost, what was copied, which attempts failed, why not others.
    Raises InvalidArgument before the first call, NotConnected."""
    report = session().last_report()
    if report is None:
        raise InvalidArgument(
            "make a call first: this thread has made none since lz.connect(); submitted ones have future.report"
        )
    return report


def synchronize(timeout_s: float | None = None) -> None:
    """Wait until all calls of this process that were enqueued on GPUs are done.

    Raises the error of one that failed after it had returned, and DeadlineExceeded when some are not done after
    `timeout_s` seconds. Calls on the CPU are done when they return.
    """
    session().gpus.synchronize(timeout_s)


def status() -> dict[str, Any]:
    """The broker and its backends: states, pids, causes, repairs. The same as `lz status --json`."""
    answer: dict[str, Any] = session().ask("status")
    return answer


def explain(op: str | Callable[..., Any], *args: Any, verbose: bool = False, **kwargs: Any) -> SelectionReport:
    """Which kernel would serve this call, and why not the others; runs nothing, copies nothing.

    op: an op's name or function, for instance lz.explain("attention", q, k, v, is_causal=True). An lz TensorSpec may
    stand for an array. verbose: the report prints every kernel with all its reasons.
    """
    report: SelectionReport = _with_handler(session().explain, op, args, kwargs)
    return replace(report, is_verbose=verbose)


def signature(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> bytes:
    """What the broker knows a call by; arguments as of `explain`."""
    return _with_handler(session().signature, op, args, kwargs)  # type: ignore[no-any-return]


class Future:
    """A submitted call. `result()` waits; it can be awaited too."""

    def __init__(
        self,
        owner: Session,
        op: str,
        submitted: Submitted | None = None,
        *,
        value: Any = None,
        record: Enqueued | None = None,
    ) -> None:
        """Without `submitted` the call has ended with `value`, or is enqueued on a GPU."""
        self._session = owner
        self._op = op
        self._submitted = submitted
        self._record: Record | SelectionReport | Enqueued | None = record
        self._value = value
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """True when `result()` would not wait."""
        submitted = self._submitted
        if submitted is not None and not submitted.pending.is_done:
            submitted.link.read_nowait()
        return submitted is None or submitted.pending.is_done

    def __repr__(self) -> str:
        if self._submitted is not None:
            state = "answered" if self._submitted.pending.is_done else "running"
        elif isinstance(self._error, LayerZeroError):
            state = f"failed, {self._error.code}"
        else:
            state = "done" if self._error is None else f"failed, {type(self._error).__name__}"
        return f"<lz.Future of {self._op}: {state}>"

    @property
    def report(self) -> SelectionReport | None:
        """As lz.last_report(), of this call; None until its result was taken."""
        report = self._session.report_of(self._record)
        if not isinstance(self._record, Enqueued):
            self._record = report
        return report

    def result(self, timeout: float | None = None) -> Any:
        """The op's result. Raises what the op raises, and TimeoutError when it is not there after `timeout` seconds:
        the call goes on then, and may be asked again."""
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)):
            raise self._too_early(timeout)
        try:
            submitted = self._submitted
            if submitted is not None:
                if not self._session.await_answer(submitted, until_s):
                    raise self._too_early(timeout)
                try:
                    self._value = self._session.finish(submitted)
                except Exception as exc:
                    self._error = exc
                self._record = self._session.last_record
                self._submitted = None
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error
        return self._value

    def _too_early(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f"{self._op} is still running after {timeout:g} s; ask again, or wait longer")

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()


def submit(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
    """Send a call and return at once: lz.submit(lz.linear, x, w).result(). Inputs must not change before it is done.

    On a GPU it is as the call itself, which does not wait either.
    """
    future: Future = _with_handler(SUBMIT, op, args, kwargs)
    return future


def _submit(request: Request) -> Future:
    owner = session()
    trace = ops.tracer.get()
    if trace is not None:
        return Future(owner, request.op, value=trace(request))
    if is_on_gpu(request.args):
        value = owner.run(request)
        record = owner.last_record
        return Future(owner, request.op, value=value, record=record if isinstance(record, Enqueued) else None)
    return Future(owner, request.op, owner.submit(request))


SUBMIT = _submit


def _with_handler(
    handle: Callable[[Request], Any], op: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    function = getattr(ops, op, None) if isinstance(op, str) else op
    if getattr(function, "__module__", None) != ops.__name__ or function is None:
        raise _no_op(op)
    token = ops.handler.set(handle)
    try:
        return function(*args, **kwargs)
    finally:
        ops.handler.reset(token)


def _no_op(op: object) -> InvalidArgument:
    """The error for what is no op of ours, with the one that is meant: by its name, or by what torch calls it."""
    name = op if isinstance(op, str) else str(getattr(op, "__name__", ""))
    shown = f"the function {name}" if name and not isinstance(op, str) else repr(op)
    meant = _ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name.lower(), OPS, n=1)), None)
    hint = f"did you mean lz.{meant}? " if meant else ""
    return InvalidArgument(f"{shown} is not an op; {hint}Ops: {', '.join(OPS)}; pass the name, or lz.NAME")


_ELSEWHERE = {"scaled_dot_product_attention": "attention", "bmm": "matmul", "mm": "matmul", "dot": "matmul"}


# --- memory


@overload
def empty(shape: int | Sequence[int]) -> NDArray[float32]: ...


@overload
def empty(shape: int | Sequence[int], dtype: type[ScalarT] | NumPyDtype[ScalarT]) -> NDArray[ScalarT]: ...


@overload
def empty(shape: int | Sequence[int], dtype: str) -> NDArray[Any]: ...


@overload
def empty(shape: int | Sequence[int], dtype: Any) -> Any: ...


def empty(shape: int | Sequence[int], dtype: Any = "float32") -> Any:
    """An uninitialised array that workers can use without a copy, as input and as out=.

    shape: extents. dtype: a torch.dtype gives a torch tensor; a NumPy dtype or a name gives a NumPy array.
    Raises OutOfMemory.
    """
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(n, int) and n >= 0 for n in extents):
        raise InvalidArgument(f"shape is {shape!r}; allowed: non-negative integers")
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(dtype, torch.dtype)
    name = str(dtype).removeprefix("torch.") if is_torch or isinstance(dtype, str) else getattr(dtype, "name", None)
    if name is None:
        name = getattr(dtype, "__name__", str(dtype))  # numpy.float32, the class
    if name not in ITEMSIZE:
        raise InvalidArgument(f"dtype is {dtype!r}; allowed: {', '.join(ITEMSIZE)}")
    spec = TensorSpec.contiguous(name, extents)
    return _fresh(spec, Array("torch" if is_torch else "numpy", spec, 0, None, None))[0]


def empty_like(array: ArrayT) -> ArrayT:
    """As `empty`, of the shape, dtype and kind of `array`."""
    like = describe(array)
    spec = TensorSpec.contiguous(like.spec.dtype, like.spec.shape)
    if like.device != CPU:
        return give(like, new_like(like, spec)[0])  # type: ignore[no-any-return]
    return _fresh(spec, like)[0]  # type: ignore[no-any-return]


def _fresh(spec: TensorSpec, like: Array) -> tuple[Any, memoryview]:
    memory, _, _ = arenas.pool.allocate(spec.span_bytes)
    value, was_copied = wrap(memory, spec, like)
    if was_copied:
        raise InvalidArgument(
            f"arrays of {type(like.obj).__name__} own their memory; use a NumPy array or a torch tensor"
        )
    return value, memory


def share(value: T) -> T:
    """Move data where workers reach it without a copy: do it once for weights and caches.

    An array gives a copy of its kind in shared memory (or itself, when it lies there already); lists, tuples and
    dicts give the same with all arrays inside shared. A torch.nn.Module is changed in place: its parameters and
    buffers move. Raises OutOfMemory; what had moved until then stays moved.
    """
    shared: T = _shared(value)
    return shared


def _shared(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shared(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_shared(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            tensor.data = _shared(tensor.data)
        return value
    array = describe(value)
    if array.device != CPU:
        return value  # a worker on that GPU reaches it as it lies, or the report says why not
    if not array.needs_copy and arenas.pool.find(array.address, array.spec.span_bytes) is not None:
        return value
    shared, memory = _fresh(TensorSpec.contiguous(array.spec.dtype, array.spec.shape), array)
    copy_into(array, memory)
    return shared
