"""Every error a caller can see or that crosses a process: one class per `code`, with plain facts."""

from __future__ import annotations

from typing import Any, ClassVar

from layerzero.ipc.wording import bounded, shortened

# Retry classes: may the same call succeed elsewhere, or at all?
NEVER, SAME, OTHER_BACKEND = "never", "same", "other_backend"
MAX_TEXT = 16_000  # characters of what an exception of the user's says


class LayerZeroError(Exception):
    """Root of all errors raised by LayerZero.

    `code` is stable across versions, `retry` says whether another attempt can help, `facts` are plain
    values (str, int, float, bool, lists and dicts of them) that travel over the wire.
    """

    code: ClassVar[str] = "ERROR"
    retry: ClassVar[str] = NEVER

    def __init__(self, message: str, /, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def to_wire(self) -> dict[str, Any]:
        """As plain values of a bounded size, whatever it quotes."""
        return {"code": self.code, "message": shortened(self.message), "facts": bounded(self.facts)}


class InvalidArgument(LayerZeroError, ValueError):
    """The call itself is wrong (shape, dtype, value). No backend can serve it; fix the arguments."""

    code = "INVALID_ARGUMENT"


class NotConnected(LayerZeroError):
    """An op was called before `lz.connect()` or after `lz.disconnect()`."""

    code = "NOT_CONNECTED"


class NoBackend(LayerZeroError):
    """No kernel accepts this call. `.report.candidates` says why for each one. Not raised when a kernel
    was tried and failed: that is BackendError."""

    code = "NO_BACKEND"
    report: Any = None


class BackendError(LayerZeroError):
    """Every kernel that was tried failed: crash, exception, or a reply that made no sense.

    Facts: `backend`, `kernel_id`, `exit_code` or `signal`, `stderr_tail`. `.report.attempts` has each try.
    With `backend=` pinned you get this at the first failure; without, only when no candidate is left.
    """

    code = "BACKEND_ERROR"
    retry = OTHER_BACKEND
    report: Any = None


class DeadlineExceeded(BackendError):
    """A kernel ran longer than `timeout_s`; its worker was killed. Raised when no other candidate is left."""

    code = "DEADLINE"


class WorkerUnreachable(BackendError):
    """A joined worker does not answer, and nobody can confirm its end: it may still write into the call's memory. The
    client calls again with other memory; callers see it when they pinned the backend, or when that memory is theirs:
    `out=` in an arena, or a tensor that the op writes in place. Fact `backend`."""

    code = "UNREACHABLE"
    retry = SAME


class GroupBroken(LayerZeroError):
    """A group's call cannot end, on any rank: a rank died, left or did not come in time, a worker of it or the broker
    died. `group.reform()` puts the group together again. Facts: `group`, `generation`, `reason` (RANK_DIED, RANK_LEFT,
    DEADLINE, WORKER_DIED, BROKER_LOST, INTERRUPTED, INCOMPLETE, FAILED, CLOSED), `ranks` (whose fault it is),
    `doing`."""

    code = "GROUP_BROKEN"
    retry = SAME


class RanksDisagree(InvalidArgument):
    """Ranks of a group called it with other ops, dtypes, shapes or options: the fact `given` has what each one gave.
    Raised on all of them; the group goes on."""

    code = "RANKS_DISAGREE"


class Poison(LayerZeroError):
    """This very call killed two workers and is refused from now on. Change the inputs, or wait until the
    quarantine (fact `quarantine_s`) is over."""

    code = "POISON"
    report: Any = None


class OutputTooSmall(LayerZeroError):
    """A kernel with a data-dependent output needs larger buffers: fact `needed`, one size per output.
    The client allocates and calls again; callers never see it."""

    code = "OUTPUT_TOO_SMALL"
    retry = SAME


class DigestRequired(LayerZeroError):
    """A call of this signature was poisonous before; the broker wants the digest of these inputs to tell
    them apart. The client adds it and calls again; callers never see it."""

    code = "DIGEST_REQUIRED"
    retry = SAME


class AdaptationRequired(LayerZeroError):
    """The best kernel takes the inputs only after a copy (fact `transforms`, such as "contiguous q"). The client makes
    it and calls again; callers see it in `report.copies` alone."""

    code = "ADAPTATION_REQUIRED"
    retry = SAME


class RunInProcess(LayerZeroError):
    """Policy wants this backend in the caller's own process: facts `backend`, `kernel_id`, `lease_s`. The client runs
    it there, or calls again for a worker; callers never see it."""

    code = "RUN_IN_PROCESS"
    retry = SAME


class Busy(LayerZeroError):
    """Too many calls are queued (fact `limit`). Nothing ran; slow down and try again."""

    code = "BUSY"
    retry = SAME


class Cancelled(LayerZeroError):
    """The call was given up before it finished, because its session was closed."""

    code = "CANCELLED"


class BrokerLost(LayerZeroError):
    """The broker went away with the call in flight. Whether a kernel ran is unknown. `lz.connect()` starts
    or finds a new one."""

    code = "BROKER_LOST"
    retry = SAME


class VersionMismatch(LayerZeroError):
    """The two sides speak different protocol versions. Facts name both and the command to run."""

    code = "VERSION_MISMATCH"


class ProtocolError(LayerZeroError):
    """A peer sent bytes that break docs/protocol.md. The peer is cut off."""

    code = "BAD_MESSAGE"
    retry = OTHER_BACKEND


class NotAllowed(LayerZeroError):
    """A peer may not connect to this broker: wrong user, no secret or a wrong one, no key or an unknown one."""

    code = "NOT_ALLOWED"


class EnvError(LayerZeroError):
    """A backend environment cannot be built or does not work. Facts: `env`, `cause`, `repair`."""

    code = "ENV_BROKEN"


class EnvChanged(EnvError):
    """A backend environment is not what was built: a file of it, or what it lies over, has changed since. Its worker
    is not started. Facts as of EnvError; `cause` names files and distributions, `repair` builds it again."""

    code = "ENV_CHANGED"


class OutOfMemory(LayerZeroError):
    """Shared memory for a tensor could not be reserved; nothing was changed. Facts: `nbytes`; where the machine or a
    control group has too little, `available_bytes`, `margin_bytes` (what stays free) and `limited_by`, too. Of blocks
    of a paged cache (layerzero.paging) `needed` and `free`."""

    code = "NO_MEMORY"


class CudaError(LayerZeroError):
    """A function of the CUDA driver failed. Facts: `call`, `number` and `name` of the CUresult, `sticky`.

    After a sticky one the process can do nothing more on that GPU and has to end. Others leave everything as it was.
    """

    code = "CUDA"
    retry = OTHER_BACKEND

    @property
    def number(self) -> int:
        number = self.facts.get("number")  # may come from another process
        return number if isinstance(number, int) else 0

    @property
    def is_sticky(self) -> bool:
        return self.facts.get("sticky") is True

    @property
    def is_out_of_memory(self) -> bool:
        return self.number == 2  # CUDA_ERROR_OUT_OF_MEMORY


class CudaGraphUnsafe(LayerZeroError):
    """The caller's stream is being captured into a CUDA graph, and the call could not be replayed with it."""

    code = "CUDA_GRAPH_UNSAFE"


class NoTransport(LayerZeroError):
    """GPU memory does not reach a worker. Facts: `transport` and `reason` of an offer that it could not use, or
    `required` and `reasons` when no way is left."""

    code = "NO_TRANSPORT"
    retry = OTHER_BACKEND


class RemoteError(LayerZeroError):
    """A function raised in its own environment (lz.isolated). Facts: `type`, the name of what it raised, `message`,
    `traceback` as text, `env`."""

    code = "REMOTE_EXCEPTION"

    @property
    def type(self) -> str:
        """Such as "ValueError", or "package.module.Error"."""
        return str(self.facts.get("type", ""))

    @property
    def traceback(self) -> str:
        return str(self.facts.get("traceback", ""))


class ConfigError(LayerZeroError, ValueError):
    """A setting, manifest, lock or descriptor is wrong; the message names file, key, value and what is allowed."""

    code = "CONFIG"


def kind_of(exc: BaseException) -> str:
    """An exception's type with its module, as callers are told of it."""
    cls = type(exc)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def text_of(exc: BaseException) -> str:
    """What an exception of the user's says: at most MAX_TEXT characters, and whatever its own code does."""
    try:
        return str(exc)[:MAX_TEXT]
    except Exception as other:
        return f"(its text cannot be had: {type(other).__name__})"


def _subclasses(cls: type[LayerZeroError]) -> list[type[LayerZeroError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _subclasses(child))]


BY_CODE: dict[str, type[LayerZeroError]] = {cls.code: cls for cls in _subclasses(LayerZeroError)}


def from_wire(value: object) -> LayerZeroError:
    """Rebuild an error another process sent. Raises ProtocolError when it is not one."""
    match value:
        case {"code": str(code), "message": str(message), "facts": dict(facts)} if all(
            isinstance(k, str) for k in facts
        ):
            cls = BY_CODE.get(code, LayerZeroError)
            error = cls(message)
            error.facts = facts
            return error
    raise ProtocolError(f"not an error on the wire: {value!r:.200}")
