"""What layerzero.torch.accelerate adds to a call: to those that it leaves to torch, and to those that it takes over.

    python bench/torch_accelerate.py

Needs torch in this interpreter (pip install 'layerzero-broker[torch]') and the environment torch (lz env build torch).
All columns of a row are measured in turns in one run, the lowest of rounds. `empty mode`: the same call under a
function mode of torch's that does nothing, without which no call of a program can be seen; `adds`: what accelerate
takes beside that, for a call that is taken over beside our op's own call. `over torch`: all of it, of which `mode` is
the floor. The op that does nothing makes its result and returns, without a worker. Rows "in a model" are those of
`accelerate(model)`, a model that makes the call 32 times, and have no mode: its floor is what torch takes to call a
kernel in Python, and to call its own from there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import finish, own_broker, parser
from torch.library import Library, get_kernel
from torch.overrides import TorchFunctionMode

import layerzero.torch as lzt
from frameworks import stub
from layerzero.torch.acceleration import functions, seam

ops = torch.ops.layerzero


class Empty(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


Block = Callable[[], contextlib.AbstractContextManager[Any]]
CALLS = 32  # of a model


class Calls(torch.nn.Module):
    """A model that makes one call many times."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self) -> None:
        call = self.call
        for _ in range(CALLS):
            call()


@contextlib.contextmanager
def forwarded() -> Iterator[None]:
    """gelu by a kernel in Python that calls torch's own: what an override costs at least."""
    library = Library("aten", "IMPL")
    for key in seam.KEYS:
        library.impl("gelu", get_kernel("aten::gelu", key).call_boxed, key, with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


def in_turns(calls: list[tuple[Block, Callable[[], Any]]], rounds: int, repeat: int) -> list[float]:
    """Microseconds of each call within its block, the lowest of rounds."""
    found = [float("inf")] * len(calls)
    for _ in range(rounds):
        for n, (block, call) in enumerate(calls):
            with block():
                for _ in range(6):  # a route, a lane
                    call()
                start = time.perf_counter_ns()
                for _ in range(repeat):
                    call()
                found[n] = min(found[n], (time.perf_counter_ns() - start) / repeat / 1e3)
    return found


def main() -> None:
    args = parser(__doc__, "a tenth of the rounds").parse_args()
    load = os.getloadavg()[0]
    rounds, repeat = (30, 10) if args.quick else (300, 20)
    torch.set_num_threads(1)
    x, strided = torch.randn(4, 512), torch.randn(512, 4).t()
    numbers = torch.ones(4, 8, dtype=torch.int64)
    layer = torch.nn.GELU()
    nothing, _ = stub()
    taken: Any = functions.RULES
    for function in (torch.neg, F.relu):
        taken[function] = functions.Rule("silu", lambda x, inplace=False: (nothing, (x,)))
    of_relu = torch.nn.ReLU()
    rows: list[tuple[str, ...]] = []

    def row(name: str, call: Callable[[], Any], ours: Callable[[], Any] | None = None) -> None:
        plain = contextlib.nullcontext
        timed: list[tuple[Block, Callable[[], Any]]] = [(plain, call), (Empty, call), (lzt.accelerate, call)]
        timed += [(plain, ours)] if ours is not None else []
        native, empty, here, *op = in_turns(timed, rounds, repeat)
        cells = [f"{time_us:.1f} us" for time_us in (native, empty, here)]
        adds, mode, all_of_it = here - (op[0] if op else empty), empty - native, here - native
        beside = [f"{time_us:+.1f} us" for time_us in (adds, mode, all_of_it)]
        rows.append((name, *cells, f"{op[0]:.1f} us" if op else "", *beside))

    def in_model(name: str, call: Callable[[], Any], ours: Callable[[], Any] | None = None) -> None:
        model, plain = Calls(call), contextlib.nullcontext
        of_model: Block = lambda: lzt.accelerate(model)  # noqa: E731
        timed: list[tuple[Block, Callable[[], Any]]] = [(plain, model), (of_model, model)]
        timed += [(plain, Calls(ours))] if ours is not None else [(forwarded, model)]
        native, here, other = (time_us / CALLS for time_us in in_turns(timed, rounds, max(1, repeat // 8)))
        op, floor = (f"{other:.1f} us", "") if ours is not None else ("", f"{other - native:+.1f} us")
        adds = here - (other if ours is not None else native)
        rows.append(
            (name, f"{native:.1f} us", "", f"{here:.1f} us", op, f"{adds:+.1f} us", floor, f"{here - native:+.1f} us")
        )

    with own_broker(), torch.no_grad():
        row("relu, which is none of ours", lambda: torch.relu(x))
        row("gelu of a strided tensor, left", lambda: F.gelu(strided))
        row("gelu of a strided tensor in a module, left", lambda: layer(strided))
        row("silu of a strided tensor, left", lambda: F.silu(strided))
        row("linear of integers, left", lambda: F.linear(numbers, numbers))
        row("an op that does nothing in place of neg", lambda: torch.neg(x), lambda: nothing(x))
        row("the same in place of F.relu, which is Python", lambda: F.relu(x), lambda: nothing(x))
        row("the same in a module", lambda: of_relu(x), lambda: nothing(x))
        row("gelu 4 x 512, taken over", lambda: F.gelu(x), lambda: ops.gelu(x))
        row("silu 4 x 512, taken over", lambda: F.silu(x), lambda: ops.silu(x))
        in_model("in a model: gelu of a strided tensor, left", lambda: F.gelu(strided))
        functions.OVERRIDDEN["gelu"] = taken[F.gelu]._replace(plan=lambda x, approximate="none": (nothing, (x,)))  # type: ignore[index]
        in_model("in a model: an op that does nothing in place of gelu", lambda: F.gelu(x), lambda: nothing(x))
    finish(
        "torch_accelerate",
        "accelerate: what it adds to a call",
        {"here": {"torch": torch.__version__}},
        ("call", "torch", "empty mode", "accelerate", "our op alone", "adds", "mode", "over torch"),
        rows,
        (f"Load average of the machine at the start: {load:.1f}; of a busy one the differences alone say something.",),
        is_quick=args.quick,
    )


if __name__ == "__main__":
    main()
