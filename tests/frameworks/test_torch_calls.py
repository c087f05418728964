"""What torch's dispatcher calls (torch/calls.py): by the C and by the Python the same results, gradients, errors."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.frameworks.torch_cases import random
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import layerzero as lz
from layerzero.client.connection import overlay
from layerzero.torch import autocasting, calls, registration
from layerzero.torch.op_entry import ANY, OpEntry

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
Op = Any
Given = tuple[Any, ...]


def mixed(
    a: Tensor, b: Tensor | None = None, scale: float = 1.0, *, out: Tensor | None = None, backend: Any = None
) -> Tensor:
    """a (1 + b) scale; with deterministic kernels 1 more. `backend` stands for a failure."""
    if backend is not None:
        raise lz.NoBackend(backend)
    policy = overlay.current()
    found = a * (1 + (0 if b is None else b)) * scale + (policy is not None and "deterministic" in policy.text)
    if out is None:
        return found.view(found.shape)  # as results in shared memory are views
    return out.copy_(found)


def split(a: Tensor, b: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    found = a * b, a + b
    return found if out is None else (out[0].copy_(found[0]), out[1].copy_(found[1]))


def mixed_formula(grad: Tensor, call: Any) -> dict[str, Tensor | None]:
    assert call.shape["a"] == tuple(grad.shape)
    found: dict[str, Tensor | None] = {}
    if "a" in call.needs:
        found["a"] = grad * (1 + (0 if call["b"] is None else call["b"])) * call["scale"]
    if "b" in call.needs:
        found["b"] = grad * call["a"] * call["scale"]
    return found


def split_formula(grads: Any, call: Any) -> dict[str, Tensor | None]:
    by_product, by_sum = grads
    rest = call["total"] - call["a"]
    return {"a": by_product * rest + by_sum, "b": by_product * call["a"] + by_sum}


def fake(a: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(a)


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Op, Op]]:
    """Of each op one by the C and one by the Python."""
    assert calls.library is not None
    found: dict[str, list[Op]] = {"mixed": [], "split": [], "add": []}
    with pytest.MonkeyPatch.context() as patch:
        for way in ("c", "python"):
            entries = (
                OpEntry(
                    f"test_mixed_{way}",
                    "Tensor a, Tensor? b=None, float scale=1.0, *, int marked=0",
                    fake,
                    mixed_formula,
                    {"a": frozenset("b"), "b": frozenset("a")},
                    autocast=autocasting.lower,
                    only_here=frozenset(("marked",)),
                    runs=mixed,
                    by_torch=lambda a, *_, **__: a.neg() if a.shape[0] == 2 else None,
                ),
                OpEntry(
                    f"test_split_{way}",
                    "Tensor a, Tensor b",
                    lambda a, b, **_: (torch.empty_like(a), torch.empty_like(a)),
                    split_formula,
                    {"a": ANY, "total": ANY},
                    results=2,
                    outs=("product", "total"),
                    also_saved="total",
                    runs=split,
                ),
                OpEntry(
                    f"test_add_{way}",
                    "Tensor(a!) a, Tensor b",
                    lambda *_: None,
                    mutates=True,
                    runs=lambda a, b: (a.add_(b), None)[1],
                ),
            )
            for entry, ops in zip(entries, found.values(), strict=True):
                registration.register(entry, entry.call)
                ops.append(getattr(torch.ops.layerzero, entry.name))
            patch.setattr(calls, "library", None)
    return {name: (one, other) for name, (one, other) in found.items()}


def leaf(*shape: int, seed: int = 0, needs: bool = True) -> Tensor:
    return random(*shape, seed=seed, dtype=torch.float64).requires_grad_(needs)


def with_gradients(needs_a: bool, needs_b: bool, *rest: Any, **options: Any) -> Callable[[Op], Any]:
    def call(op: Op) -> Any:
        a, b = leaf(3, 4, needs=needs_a), leaf(3, 4, seed=1, needs=needs_b)
        out = op(a, b, *rest, **options)
        first = out[0] if isinstance(out, tuple) else out
        saved = [tuple(one.shape) for one in first.grad_fn.saved_tensors if one is not None]
        total = sum(one.square().sum() for one in (out if isinstance(out, tuple) else (out,)))
        torch.as_tensor(total).backward()
        return out, a.grad, b.grad, saved, type(first.grad_fn).__name__.replace("python", "c")

    return call


def alone(op: Op) -> Any:
    a = leaf(3, 4)
    found = op(a)
    found.mul_(2.0)  # nobody's view
    return torch.autograd.grad(found.sum(), a), found


def in_inference(op: Op) -> Any:
    with torch.inference_mode():
        found = op(leaf(3, 4, needs=False), leaf(3, 4, seed=1, needs=False))
        first = found[0] if isinstance(found, tuple) else found
        return first.is_inference(), *(one.clone() for one in (found if isinstance(found, tuple) else (found,)))


def deterministic(op: Op) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return op(leaf(3, 4, needs=False)), with_gradients(True, True)(op)
    finally:
        torch.use_deterministic_algorithms(False)


def changed_after(op: Op) -> Any:
    a, b = leaf(3, 4), leaf(3, 4, seed=1, needs=False)
    out = op(a, b)
    b.add_(1.0)
    (out[0] if isinstance(out, tuple) else out).sum().backward()


def twice(op: Op) -> Any:
    a = leaf(3, 4)
    out = op(a, leaf(3, 4, seed=1))
    out = out[0] if isinstance(out, tuple) else out
    torch.autograd.grad(out.sum(), a, create_graph=True)[0].sum().backward()


def in_torch_func(op: Op) -> Any:
    def loss(a: Tensor) -> Tensor:
        out = op(a, leaf(3, 4, seed=1, needs=False))
        return (out[0] if isinstance(out, tuple) else out).square().sum()

    return torch.func.grad(loss)(leaf(3, 4, needs=False)), torch.func.grad(lambda a: torch.func.grad(loss)(a).sum())(
        leaf(3, 4, needs=False)
    )


def without_torch_func(op: Op) -> Any:
    """Inside of a transform, and out of its sight."""

    def inner(x: Tensor) -> Tensor:
        with torch._C._DisableFuncTorch():
            kept.append(with_gradients(True, False)(op))
        return x.sum()

    kept: list[Any] = []
    torch.func.grad(inner)(leaf(3, 4, needs=False))
    return kept


class Heard(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names.append(str(func).replace("python", "c"))
        return func(*args, **(kwargs or {}))


names: list[str] = []


def under_a_mode(op: Op) -> Any:
    names.clear()
    with Heard():
        found = with_gradients(True, True)(op)
    return found, list(names)


def in_autocast(op: Op) -> Any:
    a, b = random(3, 4).requires_grad_(), random(3, 4, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        out = op(a, b)
    out = out[0] if isinstance(out, tuple) else out
    out.sum().backward()
    return out, a.grad


def negated(op: Op) -> Any:
    return op(torch._neg_view(leaf(3, 4, needs=False)), leaf(3, 4, needs=False))


def failing(op: Op) -> Any:
    """Raised below the guards, which are left."""
    for needs in (True, False):
        with pytest.raises(lz.NoBackend):
            op(leaf(3, 4, needs=needs), None, backend="no such")
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView)
    return alone(op)


BOTH: dict[str, Callable[[Op], Any]] = {
    **{f"gradients {a} {b}": with_gradients(a, b) for a, b in ((True, True), (True, False), (False, True))},
    "no_grad": torch.no_grad()(lambda op: op(leaf(3, 4), leaf(3, 4, seed=1))),
    "none needed": lambda op: op(leaf(3, 4, needs=False), leaf(3, 4, seed=1, needs=False)),
    "inference": in_inference,
    "changed": changed_after,
    "twice": twice,
    "torch.func": in_torch_func,
    "hidden": without_torch_func,
    "mode": under_a_mode,
    "autocast": in_autocast,
    "negated": negated,
    "vmap": lambda op: torch.func.vmap(op)(leaf(3, 4, needs=False), leaf(3, 4, needs=False)),
    "forward mode": lambda op: torch.func.jvp(op, (leaf(3, 4),) * 2, (leaf(3, 4),) * 2),
    "too few": lambda op: op(),
}
OF_MIXED: dict[str, Callable[[Op], Any]] = {
    "alone": alone,
    "value": with_gradients(True, True, 3.0),
    "option of ours": with_gradients(True, True, marked=7),
    "option": lambda op: op(leaf(3, 4, needs=False), scale=2.0, marked=7),
    "deterministic": deterministic,
    "failing": failing,
    "torch's": lambda op: (op(leaf(2, 4)).grad_fn is not None, op(leaf(2, 4, needs=False))),
}


def outcome(call: Callable[[Op], Any], op: Op) -> Any:
    try:
        return "found", call(op)
    except (lz.LayerZeroError, RuntimeError) as error:
        return type(error), str(error).replace("python", "c").partition("\n")[0]


def same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert (one.requires_grad, one._is_view()) == (other.requires_grad, other._is_view())
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for member, another in zip(one, other, strict=True):
            same(member, another)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("which", "state"), [("mixed", state) for state in BOTH | OF_MIXED] + [("split", state) for state in BOTH]
)
def test_a_call_fares_as_by_the_python(pairs: dict[str, tuple[Op, Op]], which: str, state: str) -> None:
    call = (BOTH | OF_MIXED)[state]
    by_c, by_python = (outcome(call, op.default) for op in pairs[which])
    if by_c[0] == "found":
        assert by_python[0] == "found", by_python
        same(by_c[1], by_python[1])
    else:
        assert by_c == by_python


def test_values_and_gradients_are_right(pairs: dict[str, tuple[Op, Op]]) -> None:
    """Against torch's autograd, in float64."""
    a, b = leaf(3, 4), leaf(3, 4, seed=1)
    for op in pairs["mixed"]:
        assert torch.autograd.gradcheck(lambda a, b, op=op: op.default(a, b, 3.0), (a, b))
        torch.testing.assert_close(op.default(a, b, 3.0), a * (1 + b) * 3.0)
    for op in pairs["split"]:
        assert torch.autograd.gradcheck(op.default, (a, b))


def test_what_writes_counts_versions_and_returns_nothing(pairs: dict[str, tuple[Op, Op]]) -> None:
    a, b = leaf(3, 4, needs=False), leaf(3, 4, seed=1, needs=False)
    for op in pairs["mixed"]:
        out = torch.zeros(3, 4, dtype=torch.float64)
        assert op.out(a, b, marked=3, out=out) is None
        assert out._version == 1  # once: copy_ lies below what counts
        torch.testing.assert_close(out, a * (1 + b))
        with pytest.raises(lz.InvalidArgument, match="with out= has no gradient"):
            op.out(leaf(3, 4), out=out)
        with torch.no_grad():
            op.out(leaf(3, 4), out=out)
        with torch.inference_mode():
            op.out(a, b, out=torch.zeros(3, 4, dtype=torch.float64))
    for op in pairs["split"]:
        product, total = torch.zeros_like(a), torch.zeros_like(a)
        assert op.out(a, b, product=product, total=total) is None
        torch.testing.assert_close((product, total), (a * b, a + b))
    for op in pairs["add"]:
        kept = a.clone()
        version = kept._version
        assert op.default(kept, b) is None
        torch.testing.assert_close(kept, a + b)
        assert kept._version > version
        with pytest.raises(lz.InvalidArgument, match="changes its arguments"):
            op.default(leaf(3, 4), b)


def test_nothing_is_left_behind(pairs: dict[str, tuple[Op, Op]]) -> None:
    """References of arguments, and objects, after calls of each kind."""
    (op, _), (several, _) = pairs["mixed"], pairs["split"]
    a, b, out = leaf(3, 4), leaf(3, 4, seed=1, needs=False), torch.zeros(3, 4, dtype=torch.float64)

    def each() -> None:
        op.default(a, b).sum().backward()
        op.default(a, b, 2.0)
        op.default(b)
        several.default(a, b)
        op.out(b, marked=1, out=out)
        outcome(lambda op: op.default(a, None, backend="none"), op)

    counts = []
    for times in (50, 500):
        for _ in range(times):
            each()
        gc.collect()
        counts.append((sys.getallocatedblocks(), *map(sys.getrefcount, (a, b, out, None))))
    before, after = counts
    assert abs(after[0] - before[0]) < 400  # what is left behind by each time is 500
    assert after[1:4] == before[1:4]
    assert abs(after[4] - before[4]) < 400
