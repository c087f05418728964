"""Calls of functions as kernels that can be lifted (docs/lifting.md): run for nobody, on memory of the worker's own,
and while their stream is captured. What they print is in the worker's log alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.lifting.reasons import MODULES_CHANGED, TRIAL_BEGUN, LiftReason
from layerzero.workers.functions.device import Span, device
from layerzero.workers.functions.there import AgainThere, Server, demand_again_there
from layerzero.workers.gpu.lifting.refusal import CannotLift
from layerzero.workers.provider import Block, Bound, Call

MAX_TRIAL_S = 1.0  # of all runs of a call on one set of memory: others' calls wait meanwhile, and may have deadlines


class LiftableCalls:
    """For the worker's one thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tell: Callable[[str], object] = lambda _: None

    def on_change(self, tell: Callable[[str], object]) -> None:
        """As Loaded: `tell` is to be called when what was lifted may be of modules that are here no more, and when a
        trial begins, whose end the broker may have to bring about."""
        self._tell = tell

    def bind(self, call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        """As provider.Bind, of `function_on_gpu`. Raises InvalidArgument for what is no such call."""
        self._server._modules.on_change = lambda: self._tell(MODULES_CHANGED)
        memories = [Span.of(block.device) for block in (*inputs, *outputs) if block is not None]
        head = bytes.fromhex(call.attrs["call"])
        try:
            made = demand_again_there(head, memories, self._server._known, lambda _: None)
        except (ProtocolError, IndexError) as exc:
            raise InvalidArgument(f"its call cannot be read: {exc}") from exc
        if made is None or len(made.outs) != 1 or made.plain.reference is not None:
            raise InvalidArgument("allowed: functions of arrays, numbers and texts by their place, with one result")

        took_s = 0.0
        self._tell(TRIAL_BEGUN)

        def bound() -> None:
            nonlocal took_s
            if took_s > MAX_TRIAL_S:
                text = f"its first runs take {took_s:.1f} s; allowed: {MAX_TRIAL_S:g}, as others' calls wait meanwhile"
                raise CannotLift(LiftReason.TOO_SLOW, text)
            start_s = time.monotonic()
            self._server._breakpoints.client = 0  # nobody's
            try:
                with self._server._output.nobodys(), device.alone(memories[0].device):
                    self._run(made, memories)
            finally:
                took_s += time.monotonic() - start_s

        return bound

    def _run(self, call: AgainThere, memories: Sequence[Any]) -> None:
        """Raises Exception, whatever the function raises."""
        server, (code, label, *_) = self._server, call.plain
        device.expect(call.results(memories))
        server._breakpoints.label = label
        given, named = call.arguments(memories)
        try:
            result = server._modules.function(code)(*given, **named)
        except Exception:
            raise
        except BaseException as exc:  # it would end the worker
            raise RuntimeError(f"{label} raised {type(exc).__name__}: {exc}") from exc
        if isinstance(result, Coroutine):
            result.close()
            raise InvalidArgument(f"{label} is a coroutine function")
        device.demand_unwritten(label)
        device.place(result, label)
