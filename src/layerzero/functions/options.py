"""The options of isolated functions and classes, and which values they may have."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary import pools

PROCESSES = ("pool", "own")
PLACEMENTS = ("worker", "auto", "in_process")
_DEVICES = re.compile(r"cuda(:\d{1,4})?")


@dataclass(frozen=True)
class Options:
    timeout_s: float | None = None
    fallback: Callable[..., Any] | None = None
    idempotent: bool = False
    keep: bool = False
    shapes: Callable[..., Any] | None = None
    workers: int | None = None
    shadow: float = 0.0
    tolerance: float = 1e-5
    process: str = "pool"
    placement: str = "worker"
    lift: bool = False
    trial: Callable[..., Any] | None = None
    device: Any = None  # as torch names it, "cuda", "cuda:1"


def options_of(make: Callable[..., Options], *args: Any, **given: Any) -> Options:
    """What `make` makes of these, checked. Raises InvalidArgument."""
    unknown = given.keys() - Options.__dataclass_fields__.keys()
    if unknown:
        known = ", ".join(Options.__dataclass_fields__)
        raise InvalidArgument(f"lz.isolated has no option {min(unknown)}; allowed: {known}")
    made = make(*args, **given)
    if made.fallback is not None and not callable(made.fallback):
        raise InvalidArgument(f"lz.isolated: fallback is {made.fallback!r:.80}; allowed: a function")
    if made.process not in PROCESSES:
        raise InvalidArgument(f"lz.isolated: process is {made.process!r:.80}; allowed: {', '.join(PROCESSES)}")
    if made.placement not in PLACEMENTS:
        raise InvalidArgument(f"lz.isolated: placement is {made.placement!r:.80}; allowed: {', '.join(PLACEMENTS)}")
    if inspect.iscoroutinefunction(made.fallback):
        name = getattr(made.fallback, "__qualname__", repr(made.fallback))
        raise InvalidArgument(f"lz.isolated: fallback {name} is asynchronous; define it without async")
    if type(made.shadow) not in (int, float) or not 0 <= made.shadow <= 1:
        raise InvalidArgument(f"lz.isolated: shadow is {made.shadow!r:.80}; allowed: a share of calls, from 0 to 1")
    if type(made.tolerance) not in (int, float) or not 0 <= made.tolerance < math.inf:
        raise InvalidArgument(f"lz.isolated: tolerance is {made.tolerance!r:.80}; allowed: 0 or more")
    if made.workers is not None:
        pools.demand_workers(made.workers)
    if type(made.lift) is not bool:
        raise InvalidArgument(f"lz.isolated: lift is {made.lift!r:.80}; allowed: True, False")
    if made.trial is not None and not (made.lift and callable(made.trial)):
        text = f"trial is {made.trial!r:.80}" if made.lift else "trial is of functions with lift=True"
        raise InvalidArgument(f"lz.isolated: {text}; allowed: a function of the same arguments, with lift=True")
    if type(made.keep) is not bool:
        raise InvalidArgument(f"lz.isolated: keep is {made.keep!r:.80}; allowed: True, False")
    if made.shapes is not None and (made.keep or not callable(made.shapes)):
        text = "what stays there with keep=True needs none" if made.keep else f"shapes is {made.shapes!r:.80}"
        raise InvalidArgument(f"lz.isolated: {text}; allowed: a function of the same arguments, without keep=True")
    return made if made.device is None else replace(made, device=_device_of(made))


def _device_of(made: Options) -> str:
    """As torch names it. Raises InvalidArgument."""
    device = made.device
    name = str(device) if type(device).__module__ == "torch" else device
    if not isinstance(name, str) or _DEVICES.fullmatch(name) is None:
        text = f"device is {device!r:.80}; allowed: the GPU that results lie on, such as cuda or cuda:1"
        raise InvalidArgument(f"lz.isolated: {text}; leave it out for results of the CPU")
    if made.lift:
        text = "lift is for calls with arrays on a GPU, which say where they are"
        raise InvalidArgument(f"lz.isolated: leave device out: {text}")
    if made.placement != "worker":
        text = "with device=: what a function makes in this process lies where it makes it"
        raise InvalidArgument(f"lz.isolated: placement is {made.placement!r}; allowed: worker, {text}")
    return name
