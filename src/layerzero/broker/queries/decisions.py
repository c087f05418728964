"""What was decided for the calls in use, for people who look on: for each signature the kernel that serves it, the
others with their reasons, and what would change for those."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from itertools import islice
from typing import Any

from layerzero.broker.queries.broker_view import BrokerView
from layerzero.broker.selection.explain import explain
from layerzero.broker.selection.signature import CallSpec
from layerzero.ipc.errors import InvalidArgument

MAX_SHOWN = 64
MAX_CANDIDATES = 24
MAX_REASONS = 4
MAX_TEXT = 600_000  # characters of all together: an answer has 1 MiB at most


def decisions(server: BrokerView, params: Mapping[str, Any]) -> Generator[None, None, dict[str, Any]]:
    """Of the calls whose routes were defined last, at most `most` of them, and no more than an answer has room for.
    `decisions`: newest first, each its `call`, `op`, `device` and `candidates` as `explain` has them; `known`: of how
    many calls there are any."""
    most = params.get("most", MAX_SHOWN)
    if type(most) is not int or not 0 < most <= MAX_SHOWN:
        raise InvalidArgument(f"decisions takes `most`: 1 to {MAX_SHOWN}, got {most!r:.40}")
    return _steps(server, most)


def _steps(server: BrokerView, most: int) -> Generator[None, None, dict[str, Any]]:
    known = server.state.signatures.known
    server.poll_lanes()
    found: list[dict[str, Any]] = []
    left = MAX_TEXT
    for signature in [*islice(reversed(known.values()), most)]:
        yield
        now_s = time.monotonic()
        unavailable = server.state.unavailable_at(now_s)
        _, candidates = explain(server.state.engine, signature.spec, unavailable, now_s)
        for candidate in candidates:
            candidate["reasons"] = candidate["reasons"][:MAX_REASONS]
        one = {
            "call": label(signature.spec),
            "op": signature.spec.op,
            "device": signature.spec.device,
            "users": signature.users,
            "candidates": candidates[:MAX_CANDIDATES],
        }
        left -= len(repr(one))
        if left < 0:
            break
        found.append(one)
    return {"decisions": found, "known": len(known)}


def label(spec: CallSpec) -> str:
    """The call in a line: matmul(64x256:float32, 256x256:float32)."""
    tensors = [f"{'x'.join(map(str, one.shape))}:{one.dtype}" for one in spec.inputs if one is not None]
    attrs = [f"{name}={_short(value)}" for name, value in spec.attrs.items() if value not in (None, "")]
    pinned = [f"backend={spec.pinned:.40}"] if spec.pinned else []
    return f"{spec.op}({', '.join((*tensors, *attrs, *pinned))})"


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value!r:.24}"
