"""What is asked of the default session besides calls: reports, explanations, futures, status."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from layerzero.client.connection.call import Request
from layerzero.client.connection.report import SelectionReport
from layerzero.client.facade import (
    activation_ops,
    attention_ops,
    cache_ops,
    elementwise_ops,
    expert_ops,
    loss_ops,
    norm_ops,
    ops,
    position_ops,
    product_ops,
    quantized_ops,
    sampling_ops,
    text_ops,
    vision_ops,
)
from layerzero.client.facade.default_session import session
from layerzero.client.facade.running import Future, handler, send
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import PUBLIC_OPS

T = TypeVar("T")


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


def explain(
    op: str | Callable[..., Any], *args: Any, verbose: bool = False, device: str | None = None, **kwargs: Any
) -> SelectionReport:
    """Which kernel would serve this call, and why not the others; runs nothing, copies nothing.

    op: an op's name or function, for instance lz.explain("attention", q, k, v, is_causal=True). An lz TensorSpec may
    stand for an array. verbose: the report prints every kernel with all its reasons. device: where the arrays are for
    which specs stand: "cpu", "cuda", "cuda:1" or a GPU's UUID; with arrays it must be theirs.
    """
    handle = functools.partial(session().explain, device=device)
    report: SelectionReport = _with_handler(handle, op, args, kwargs)
    return replace(report, is_verbose=verbose)


def signature(op: str | Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any) -> bytes:
    """What the broker knows a call by; arguments as of `explain`."""
    handle = functools.partial(session().signature, device=device)
    return _with_handler(handle, op, args, kwargs)  # type: ignore[no-any-return]


def request(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Request:
    """A call, checked and not made. Raises InvalidArgument."""
    return _with_handler(lambda made: made, op, args, kwargs)  # type: ignore[no-any-return]


def run_apart(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, SelectionReport]:
    """Result and report of a call of a tool, waited for also on a GPU (Session.run_apart). Raises what the op
    raises."""
    found: tuple[Any, SelectionReport] = _with_handler(session().run_apart, op, args, kwargs)
    return found


def submit(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
    """Send a call and return at once: lz.submit(lz.linear, x, w).result(). Inputs must not change before it is done.

    On a GPU it is as the call itself, which does not wait either.
    """
    future: Future = _with_handler(send, op, args, kwargs)
    return future


def function_of(op: str) -> Callable[..., Any]:
    """The function of one of PUBLIC_OPS."""
    module = next(one for one in _MODULES if hasattr(one, op))
    function: Callable[..., Any] = getattr(module, op)
    return function


_MODULES = (
    *(ops, activation_ops, attention_ops, cache_ops, elementwise_ops, expert_ops, loss_ops, norm_ops, product_ops),
    *(quantized_ops, sampling_ops, text_ops, vision_ops, position_ops),
)
_HOMES = frozenset(module.__name__ for module in _MODULES)


def _with_handler(
    handle: Callable[[Request], Any], op: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    function = (function_of(op) if op in PUBLIC_OPS else None) if isinstance(op, str) else op
    if function is None or getattr(function, "__module__", None) not in _HOMES:
        raise _no_op(op)
    token = handler.set(handle)
    try:
        return function(*args, **kwargs)
    finally:
        handler.reset(token)


def _no_op(op: object) -> InvalidArgument:
    """The error for what is no op of ours, with the one that is meant: by its name, or by what torch calls it."""
    name = op if isinstance(op, str) else str(getattr(op, "__name__", ""))
    shown = f"the function {name}" if name and not isinstance(op, str) else repr(op)
    meant = _ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name.lower(), PUBLIC_OPS, n=1)), None)
    hint = f"did you mean lz.{meant}? " if meant else ""
    return InvalidArgument(f"{shown} is not an op; {hint}Ops: {', '.join(PUBLIC_OPS)}; pass the name, or lz.NAME")


_OF_DIMS = ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
_ELSEWHERE = {
    "scaled_dot_product_attention": "attention",
    **dict.fromkeys(("bmm", "mm", "mv", "dot"), "matmul"),
    **{f"{op}{n}d": op for op in _OF_DIMS for n in (1, 2, 3)},
    **{"multiply": "mul", "clip": "clamp", "concat": "cat", "concatenate": "cat", "to": "cast", "astype": "cast"},
}
