"""Whether this installation does what it promises: by a broker of its own, with real workers, compared with NumPy's
float64. Nothing of it is kept."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from layerzero.client.facade import api
from layerzero.client.tools.replay import START_S, distance, own_broker
from layerzero.ipc.errors import EnvError, InvalidArgument, LayerZeroError
from layerzero.ipc.vocabulary.numerics import TOLERANCE

if TYPE_CHECKING:
    import numpy as np

MAX_CALLS = 1000  # until a call is on a lane
OK, FAILED, SKIPPED = "ok", "failed", "skipped"


@dataclass(frozen=True)
class Check:
    """What was tried, what came of it (OK, FAILED, SKIPPED), more of that for people, and how long it took."""

    name: str
    outcome: str
    detail: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def selftest(backends: list[str] | None = None, begins: Callable[[str], None] = lambda _: None) -> Iterator[Check]:
    """Checks as they end. backends: names; all that can serve here if left out. `begins` is told what is tried.

    Of each backend the calls of CALLS that it has, with results within the tolerances of docs/ops.md from NumPy's
    float64; then, of the first one: its calls get a lane, and a call whose worker was killed before ends well. Raises
    EnvError without NumPy, InvalidArgument for an unknown backend, and what connecting raises.
    """
    try:
        calls = _calls()
    except ImportError as exc:
        raise EnvError(
            "the reference is NumPy's, which is not installed here", repair="pip install 'layerzero-broker[demo]'"
        ) from exc
    begins("the broker")
    start_s = time.monotonic()
    with own_broker(LAYERZERO_EXPRESS="true") as session:
        rows = {row["name"]: row for row in session.ask("status")["backends"]}
        yield Check("broker", OK, f"pid {session.broker_pid}", time.monotonic() - start_s)
        unknown = [name for name in backends or () if name not in rows]
        if unknown:
            raise InvalidArgument(f"no backend is called {unknown[0]!r:.80}; known: {', '.join(rows)}")
        usable: list[str] = []
        for name in backends or list(rows):
            begins(name)
            found = _backend(name, rows[name], calls, is_asked_for=backends is not None)
            if found is not None:
                yield found
                usable += [name] if found.outcome == OK and "silu" in rows[name]["ops"] else []
        if usable:
            begins("an express lane")
            yield _timed("express lane", lambda: _lane(usable[0]))
            begins("a worker that dies")
            yield _timed("death of a worker", lambda: _death(session, usable[0]))


def _timed(name: str, check: Callable[[], tuple[str, str]]) -> Check:
    start_s = time.monotonic()
    try:
        outcome, detail = check()
    except LayerZeroError as exc:
        outcome, detail = FAILED, f"{exc.code}: {exc.message}"
    return Check(name, outcome, detail, time.monotonic() - start_s)


def _backend(
    name: str, row: dict[str, Any], calls: dict[str, tuple[tuple[Any, ...], Any]], *, is_asked_for: bool
) -> Check | None:
    """None of one that is not for this machine, or that was never run, unless somebody asked for it."""
    why = row["unavailable"]
    if why is not None:
        if why["code"] in ("NOT_FOR_MACHINE", "NOT_RUN") and not is_asked_for:
            return None
        return Check(name, FAILED if is_asked_for else SKIPPED, f"{why['detail']}; {why['repair']}".rstrip("; "), 0.0)
    ops = [op for op in calls if op in row["ops"]]
    if not ops:
        return Check(
            name, SKIPPED, f"no call here is for {', '.join(row['ops'][:4])}; lz doctor --ready starts it", 0.0
        )
    return _timed(name, lambda: _compare(name, {op: calls[op] for op in ops}))


def _compare(name: str, calls: dict[str, tuple[tuple[Any, ...], Any]]) -> tuple[str, str]:
    furthest, done = 0.0, []
    for op, (args, wanted) in calls.items():
        result, report = api.run_apart(op, *args, backend=name, timeout_s=START_S)
        far = distance(result, wanted)
        if not far <= TOLERANCE["float32"]:
            return FAILED, f"{report.kernel_id}: {far:.1e} from the reference; allowed: {TOLERANCE['float32']:g}"
        furthest = max(furthest, far)
        done.append(op)
    return OK, f"{', '.join(done)}: at most {furthest:.1e} from float64"


def _lane(name: str) -> tuple[str, str]:
    x = _numbers((8,))
    for count in range(1, MAX_CALLS + 1):
        _, report = api.run_apart("silu", x, backend=name)
        if report.path != "broker":
            return OK, f"{name}: by {report.path} from call {count} on"
    return FAILED, f"{name}: none of {MAX_CALLS} calls went by a lane"


def _death(session: Any, name: str) -> tuple[str, str]:
    x = _numbers((8,))
    [pid] = [row["pid"] for row in session.ask("status")["backends"] if row["name"] == name]
    if not pid:
        return SKIPPED, f"{name} has no worker of its own here"
    os.kill(pid, signal.SIGKILL)
    result, report = api.run_apart("silu", x, timeout_s=START_S)
    far = distance(result, _silu(x))
    if not far <= TOLERANCE["float32"]:
        return FAILED, f"{report.kernel_id}: {far:.1e} from the reference; allowed: {TOLERANCE['float32']:g}"
    return OK, f"{name}'s worker was killed; {report.kernel_id} answered the next call"


def _calls() -> dict[str, tuple[tuple[Any, ...], Any]]:
    """Arguments and the right result of a call of each op that is tried."""
    import numpy as np

    x, w, b = _numbers((16, 64)), _numbers((32, 64)), _numbers((64,))
    wide = x.astype(np.float64)
    exp = np.exp(wide - wide.max(-1, keepdims=True))
    centred = wide - wide.mean(-1, keepdims=True)
    norm = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return {
        "silu": ((x,), _silu(x)),
        "softmax": ((x, -1), exp / exp.sum(-1, keepdims=True)),
        "matmul": ((x, np.ascontiguousarray(w.T)), wide @ w.T.astype(np.float64)),
        "linear": ((x, w), wide @ w.T.astype(np.float64)),
        "layer_norm": ((x, (64,), b, b), norm * b + b),
        "attention": _attention(),
    }


def _attention() -> tuple[tuple[Any, ...], Any]:
    import numpy as np

    q, k, v = (_numbers((1, 2, 16, 32), seed) for seed in (1, 2, 3))
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) / np.sqrt(32)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (q, k, v), (weights / weights.sum(-1, keepdims=True)) @ v.astype(np.float64)


def _silu(x: np.ndarray) -> np.ndarray:
    import numpy as np

    wide = x.astype(np.float64)
    found: np.ndarray = wide / (1 + np.exp(-wide))
    return found


def _numbers(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    import numpy as np

    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
