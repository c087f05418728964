"""torch.ops.layerzero: each op is one that torch.compile, autograd, autocast and vmap can work with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frameworks.torch_cases import NATIVE, Case, cases, joined, random

import layerzero as lz
import layerzero.torch
from layerzero.torch.table import TABLE

ops = torch.ops.layerzero
CASES = [(name, index) for name, found in cases().items() for index in range(len(found))]
TO_INTEGERS = ("sample", "speculative_verify", "tree_accept", "int_matmul")
IN_PLACE = [name for name, entry in TABLE.items() if entry.mutates]
DIFFERENTIABLE = [name for name, entry in TABLE.items() if entry.formula is not None]


def case(name: str, index: int = 0, **options: Any) -> Case:
    return cases(**options)[name][index]


def op(name: str) -> Any:
    return getattr(ops, name).default


def test_every_tensor_op_is_one_of_torch() -> None:
    """A new op of ours must come here, too, with a case for these tests."""
    from layerzero.ipc.vocabulary.ops import CALLED_OPS

    assert set(TABLE) == set(cases()) == set(CALLED_OPS) - {"tokenize", "detokenize", "null", "function"}


@pytest.mark.parametrize(("name", "index"), CASES)
def test_op_passes_opcheck(name: str, index: int) -> None:
    """torch's own test of an op: its schema, its fake function (symbolic sizes, too, and strides), its autograd."""
    args, options = case(name, index, needs_grad=name in DIFFERENTIABLE)
    args = tuple(
        arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg for arg in args
    )
    narrow = any(
        isinstance(arg, torch.Tensor) and str(arg.dtype).startswith("torch.float") and arg.element_size() == 1
        for arg in args
    )
    # torch's test copies and adds up arguments, which it cannot do with narrow floats itself.
    which = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op(name), args, options, **({"test_utils": which} if narrow else {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_values_are_torchs(name: str, dtype: torch.dtype) -> None:
    """In float64; half types are compared with the float64 result of the rounded inputs, at twice their epsilon."""
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[dtype]
    for args, options in cases(dtype)[name]:
        found = joined(op(name)(*args, **options))
        wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        expected = joined(NATIVE[name](*wide, **options)).nan_to_num()  # rows that see nothing are 0 here, NaN in torch
        assert found.dtype == getattr(torch, options.get("dtype", ""), dtype)
        assert found.is_contiguous()
        scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("name", "index"), [pair for pair in CASES if pair[0] not in IN_PLACE and TABLE[pair[0]].results == 1]
)
def test_out_form_writes_the_same(name: str, index: int) -> None:
    """Into a strided tensor, too, whose version tells autograd that it was changed."""
    args, options = case(name, index)
    expected = op(name)(*args, **options)
    out = torch.empty((*expected.shape, 2), dtype=expected.dtype)[..., 0]
    version = out._version
    assert getattr(ops, name)(*args, **options, out=out) is None
    assert out._version > version
    torch.testing.assert_close(out.float(), expected.float())  # maybe by another kernel


def test_out_form_is_an_op_of_torch() -> None:
    """Compilers change what it writes into."""
    torch.library.opcheck(ops.silu.out, (random(3, 4),), {"out": torch.empty(3, 4)})
    with pytest.raises(lz.InvalidArgument, match="never resized"):
        ops.silu(torch.empty(3, 4, device="meta"), out=torch.empty(3, 5, 6, device="meta"))
    with pytest.raises(lz.InvalidArgument, match="out= has no gradient"):
        ops.silu(random(3, 4, needs_grad=True), out=torch.empty(3, 4))


def test_results_can_be_changed_in_place() -> None:
    """They lie in shared memory, of which autograd must not know."""
    x, w = random(3, 4, needs_grad=True), random(3, 4, seed=1, needs_grad=True)
    y = ops.silu(x)
    y.mul_(2.0).add_(w)
    y.sum().backward()
    z = x.detach().requires_grad_()
    (2.0 * F.silu(z)).sum().backward()
    torch.testing.assert_close(x.grad, z.grad)
    with torch.no_grad():
        y = ops.silu(x)
    y.mul_(w)
    assert y.requires_grad


def test_saved_tensors_that_change_are_noticed() -> None:
    """append_kv and out= count as changes."""
    x = random(3, 4, needs_grad=True)
    w = random(3, 4)
    y = (x * w).sum()
    ops.silu(w.clone(), out=w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_worker_may_die_between_forward_and_backward() -> None:
    """What backward needs is the program's own."""
    x, w = random(3, 4, needs_grad=True), random(5, 4, seed=1, needs_grad=True)
    y = ops.linear(x, w, backend="torch")
    (row,) = [row for row in lz.status()["backends"] if row["name"] == "torch"]
    os.kill(row["pid"], signal.SIGKILL)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3, 5) @ w)
    torch.testing.assert_close(ops.linear(x, w), F.linear(x, w))  # and another one serves


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in TABLE if name not in (*DIFFERENTIABLE, *TO_INTEGERS, *IN_PLACE)])
def test_ops_without_a_formula_say_so(name: str) -> None:
    """A gradient that is silently missing would be the worst."""
    args, options = case(name, needs_grad=True)
    args = tuple(a.requires_grad_() if isinstance(a, torch.Tensor) and a.dtype == torch.float32 else a for a in args)
    options = {**options, "dtype": "float8_e5m2"} if name in ("quantize", "dynamic_quantize") else options
    result = op(name)(*args, **options)
    result = result[0] if isinstance(result, tuple) else result
    with pytest.raises(lz.InvalidArgument, match=f"layerzero::{name} has no gradient formula; call it under"):
        result.float().sum().backward()


def test_what_changes_its_arguments_has_no_gradient() -> None:
    args, options = case("append_kv", needs_grad=True)
    with pytest.raises(lz.InvalidArgument, match=r"layerzero::append_kv changes its arguments"):
        op("append_kv")(*args, **options)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_derivatives_are_refused_by_name(name: str) -> None:
    """Those of the formulas would be right today, and a kernel's tomorrow would not be there."""
    args, options = case(name, dtype=torch.float64, needs_grad=True)
    args = tuple(a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args)
    given = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    grads = torch.autograd.grad(joined(op(name)(*args, **options)).square().sum(), given, create_graph=True)
    with pytest.raises(lz.InvalidArgument, match=f"layerzero::{name} has no second derivative"):
        grads[0].sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # which torch.func.jvp uses
def test_forward_mode_is_refused() -> None:
    """torch would take the derivative for zero."""
    x = random(3, 4)
    with pytest.raises(lz.InvalidArgument, match=r"layerzero::silu has no forward-mode derivative"):
        torch.func.jvp(ops.silu, (x,), (x,))


def test_lz_functions_name_the_op_with_gradients() -> None:
    """lz.silu does what it always did."""
    with pytest.raises(lz.InvalidArgument, match=r"layerzero\.torch"):
        lz.silu(random(3, 4, needs_grad=True))


# --- transformations ---------------------------------------------------------------------------------------------


def test_gradients_of_torch_func() -> None:
    """grad, vjp, jacrev, and per-sample gradients by vmap."""
    x, w = random(3, 4), random(5, 4, seed=1)

    def loss(w: torch.Tensor, x: torch.Tensor, silu: Any = ops.silu, linear: Any = ops.linear) -> torch.Tensor:
        return silu(linear(x, w)).square().sum()

    native = {"silu": F.silu, "linear": F.linear}
    torch.testing.assert_close(torch.func.grad(loss)(w, x), torch.func.grad(lambda w: loss(w, x, **native))(w))
    torch.testing.assert_close(torch.func.jacrev(ops.silu)(x), torch.func.jacrev(F.silu)(x))
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    torch.testing.assert_close(each, torch.stack([torch.func.grad(loss)(w, row) for row in x]))


@pytest.mark.parametrize(
    "name", ["silu", "swiglu", "gelu", "softmax", "layer_norm", "rms_norm", "linear", "matmul", "rope", "attention"]
)
def test_derivatives_of_torch_func_may_be_nested(name: str) -> None:
    """The formulas are torch's, so the second derivative is there; to take it for zero would be silent and wrong. One
    level may be the program's own autograd."""
    args, options = case(name, dtype=torch.float64)
    x = args[0]

    def twice(call: Any) -> torch.Tensor:
        def once(x: torch.Tensor) -> torch.Tensor:
            return torch.func.grad(lambda x: call(x, *args[1:], **options).square().sum())(x).square().sum()

        return once

    expected = torch.func.grad(twice(NATIVE[name]))(x)
    torch.testing.assert_close(torch.func.grad(twice(op(name)))(x), expected)
    leaf = x.detach().requires_grad_()
    twice(op(name))(leaf).backward()
    torch.testing.assert_close(leaf.grad, expected)


VMAP = [
    (name, index, which)
    for name, index in CASES
    for which in ("all", "first", "last")
    if TABLE[name].batch is not None and (which == "all" or index == 0)
]


@pytest.mark.parametrize(("name", "index", "which"), VMAP)
def test_vmap_is_the_loop(name: str, index: int, which: str) -> None:
    """Of each tensor argument a stack, along its first or its last dimension, or of some alone."""
    args, options = case(name, index)
    places = [n for n, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    chosen = {"all": places, "first": places[:1], "last": places[-1:]}[which]
    if name == "embedding":
        chosen = places[:1]
    if name in ("quantize", "dequantize") and which == "last":
        pytest.skip("as first")
    in_dims = tuple(
        None if n not in chosen else (-1 if n % 2 and args[n].element_size() > 1 else 0) for n in range(len(args))
    )
    samples = [[_other(arg, sample) if n in chosen else arg for n, arg in enumerate(args)] for sample in range(3)]
    stacked = [
        _stack([sample[n] for sample in samples], in_dims[n]) if n in chosen else arg for n, arg in enumerate(args)
    ]
    found = torch.func.vmap(lambda *given: joined(op(name)(*given, **options)), in_dims=in_dims)(*stacked)
    expected = [joined(op(name)(*sample, **options)) for sample in samples]
    assert found.shape == (3, *expected[0].shape)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-5, atol=1e-5)


def _stack(tensors: list[torch.Tensor], dim: int | None) -> torch.Tensor:
    if tensors[0].dtype == torch.float4_e2m1fn_x2:
        return torch.stack([tensor.view(torch.uint8) for tensor in tensors]).view(torch.float4_e2m1fn_x2)
    return torch.stack(tensors, dim or 0)


def _other(tensor: torch.Tensor, sample: int) -> torch.Tensor:
    """Another of the same kind."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        return tensor
    return tensor * (1.0 + sample / 4)


@pytest.mark.parametrize("name", [name for name, entry in TABLE.items() if entry.batch is None])
def test_vmap_of_others_is_refused_by_name(name: str) -> None:
    args, options = case(name)
    stacked = [torch.stack((arg, arg)) if isinstance(arg, torch.Tensor) else arg for arg in args]
    in_dims = tuple(0 if isinstance(arg, torch.Tensor) else None for arg in args)
    with pytest.raises(lz.InvalidArgument, match=f"layerzero::{name} has no batch rule"):
        torch.func.vmap(lambda *given: op(name)(*given, **options), in_dims=in_dims)(*stacked)


# --- autocast ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "matmul", "attention", "softmax", "layer_norm", "rms_norm", "silu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_autocast_gives_torchs_dtype(name: str, dtype: torch.dtype) -> None:
    """As torch's own function under autocast, backward included."""
    args, options = case(name, dtype=dtype, needs_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = op(name)(*args, **options), NATIVE[name](*args, **options)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    found.sum().backward()
    assert all(arg.grad.dtype == dtype for arg in args if isinstance(arg, torch.Tensor))


def test_autocast_takes_tensors_of_two_dtypes() -> None:
    """Weights stay float32 while activations are half; what torch's kernels take so, ours do."""
    x, w = random(3, 4, dtype=torch.bfloat16), random(4, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = ops.layer_norm(x, [4], w), F.layer_norm(x, [4], w)
        assert ops.swiglu(x, w.expand(3, 4)).dtype == torch.float32
        assert ops.rope(x.view(3, 1, 4), w.expand(3, 4)[:, :2], w.expand(3, 4)[:, :2]).dtype == torch.bfloat16
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    with pytest.raises(lz.InvalidArgument, match="one dtype for all"):
        ops.layer_norm(x, [4], w)


# --- where it runs -----------------------------------------------------------------------------------------------


def test_inference_mode_and_threads() -> None:
    """Calls of many threads at once, in a mode of theirs."""
    found: dict[int, torch.Tensor] = {}

    def call(seed: int) -> None:
        with torch.inference_mode():
            for _ in range(5):
                found[seed] = ops.linear(random(4, 8, seed=seed), random(6, 8, seed=99))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(6):
        assert found[seed].is_inference()
        expected = F.linear(random(4, 8, seed=seed), random(6, 8, seed=99))
        torch.testing.assert_close(found[seed].clone(), expected)


def test_backend_and_timeout_reach_the_call() -> None:
    ops.silu(random(3, 4), backend="torch", timeout_s=30.0)
    report = lz.last_report()
    assert report is not None
    assert report.kernel_id.startswith("torch.")
    with pytest.raises(lz.NoBackend):
        ops.silu(random(3, 4), backend="tiktoken")


def test_import_of_layerzero_loads_no_torch() -> None:
    """Whoever uses NumPy pays nothing for this."""
    code = "import sys, layerzero; layerzero.silu; print('torch' in sys.modules, 'layerzero.torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["False", "False"]
