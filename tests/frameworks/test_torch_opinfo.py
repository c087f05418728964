"""torch's own samples (OpInfo) of each function that we have an op for: values and gradients against torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import layerzero as lz
import layerzero.torch as lzt

opinfo = pytest.importorskip("torch.testing._internal.common_methods_invocations")
Call = Callable[..., torch.Tensor]


class Served(NamedTuple):
    """An OpInfo by name and variant, our function, which samples it refuses, as docs/ops.md says, and how many are left
    at least."""

    name: str
    ours: Call
    variant: str = ""
    refused: Callable[[Any], bool] = lambda sample: False
    least: int = 3


def _sdpa_is_refused(sample: Any) -> bool:
    """Heads and batches that broadcast, but with dropout, which is torch's."""
    q, (k, v, *_) = sample.input, sample.args
    unequal = q.shape[:-3] != k.shape[:-3] or k.shape[:-2] != v.shape[:-2]
    grouped = q.dim() > 2 and q.shape[-3] != k.shape[-3] and not sample.kwargs.get("enable_gqa")
    return not sample.kwargs.get("dropout_p") and (unequal or grouped)


def _has_negative_eps(sample: Any) -> bool:
    return (sample.kwargs.get("eps") or 0.0) < 0.0


def _is_training(sample: Any) -> bool:
    """Statistics of the batch itself; torch takes an empty vector, too."""
    return bool(sample.kwargs.get("training")) or sample.args[0] is None or sample.input.dim() < 2


def _instance_norm(x: torch.Tensor, *, weight: Any = None, bias: Any = None, eps: float = 1e-5, **other: Any) -> Any:
    """torch's samples have running statistics, which it updates, and does not use: use_input_stats is not false."""
    assert other.get("use_input_stats", True)
    assert other.keys() <= {"running_mean", "running_var", "momentum", "use_input_stats"}
    return torch.ops.layerzero.instance_norm(x, weight, bias, eps)


SERVED = [
    Served("nn.functional.silu", lzt.silu),
    Served("nn.functional.gelu", lzt.gelu),
    Served("softmax", lzt.softmax),
    Served("softmax", lzt.softmax, "with_dtype", lambda sample: not sample.kwargs["dtype"].is_floating_point),
    Served("nn.functional.layer_norm", lzt.layer_norm, "", _has_negative_eps),
    Served("nn.functional.rms_norm", lzt.rms_norm, "", _has_negative_eps),
    Served("log_softmax", torch.ops.layerzero.log_softmax),
    Served("nn.functional.group_norm", torch.ops.layerzero.group_norm, "", _has_negative_eps),
    Served("nn.functional.batch_norm", torch.ops.layerzero.batch_norm, "", _is_training),
    Served("nn.functional.instance_norm", _instance_norm),
    # torch takes some biases that broadcast.
    Served("nn.functional.linear", lzt.linear, "", lambda sample: len(sample.args) > 1 and not _is_plain(sample)),
    Served("matmul", lzt.matmul),
    Served("mm", lzt.matmul),
    Served("bmm", lzt.matmul, least=1),
    Served("mv", lzt.matmul, least=1),
    Served("addmm", torch.ops.layerzero.addmm),
    *(Served(f"nn.functional.conv{d}d", getattr(lzt, f"conv{d}d")) for d in (1, 2, 3)),
    *(Served(f"nn.functional.conv_transpose{d}d", getattr(lzt, f"conv_transpose{d}d")) for d in (1, 2, 3)),
    Served("add", lambda x, other, alpha=1: torch.ops.layerzero.add(x, alpha * other)),
    Served("mul", torch.ops.layerzero.mul),
    # Its own samples have tensors for bounds.
    Served(
        "nn.functional.hardtanh", lambda x, min_val=-1.0, max_val=1.0: torch.ops.layerzero.clamp(x, min_val, max_val)
    ),
    Served("where", lambda x, condition, other: torch.ops.layerzero.where(condition, x, other)),
    Served("cat", lzt.cat, "", lambda sample: len(sample.input) > 8 or len({t.dim() for t in sample.input}) > 1),
    Served("nn.functional.embedding", lambda weight, ids, **options: lzt.embedding(ids, weight, **options)),
    Served("nn.functional.scaled_dot_product_attention", lzt.scaled_dot_product_attention, "", _sdpa_is_refused),
]


def _is_plain(sample: Any) -> bool:
    weight, bias = sample.args[:2]
    return bias is None or bias.shape == weight.shape[:-1]


def samples(served: Served, dtype: torch.dtype, needs_grad: bool) -> Iterator[tuple[Any, Any]]:
    (info,) = [o for o in opinfo.op_db if (o.name, o.variant_test_name) == (served.name, served.variant)]
    for sample in info.sample_inputs("cpu", dtype, requires_grad=needs_grad):
        if not served.refused(sample) and not sample.kwargs.get("dropout_p"):  # which is torch's, and random
            yield info.op, sample


pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's, of its own
IDS = [f"{served.name}-{served.variant}" for served in SERVED]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("served", SERVED, ids=IDS)
def test_samples_have_torchs_values(served: Served, dtype: torch.dtype) -> None:
    """Half types within the tolerance that torch's own tests give them."""
    tolerance = {torch.float64: 1e-7, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    count = 0
    for theirs, sample in samples(served, dtype, False):
        expected = theirs(sample.input, *sample.args, **sample.kwargs)
        found = served.ours(sample.input, *sample.args, **sample.kwargs)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected.nan_to_num(), rtol=tolerance, atol=tolerance * _size(expected))
        count += 1
    assert count >= served.least


def _size(tensor: torch.Tensor) -> float:
    return max(1.0, float(tensor.nan_to_num().abs().max())) if tensor.numel() else 1.0


@pytest.mark.parametrize("served", SERVED, ids=IDS)
def test_samples_have_torchs_gradients(served: Served) -> None:
    """In float64, also by gradcheck for the small ones; a second derivative is refused by name."""
    count = 0
    for theirs, sample in samples(served, torch.float64, True):
        first = sample.input if isinstance(sample.input, (list, tuple)) else (sample.input,)  # several, of cat
        given = [a for a in (*first, *sample.args, *sample.kwargs.values()) if _is_leaf(a)]
        expected = theirs(sample.input, *sample.args, **sample.kwargs)
        if not expected.requires_grad or expected.isnan().any():
            continue
        found = served.ours(sample.input, *sample.args, **sample.kwargs)
        grad = torch.randn_like(expected)
        ours = torch.autograd.grad(found, given, grad, create_graph=True, allow_unused=True)
        right = torch.autograd.grad(expected, given, grad, allow_unused=True)
        for one, other in zip(ours, right, strict=True):
            torch.testing.assert_close(_dense(one), _dense(other), rtol=1e-6, atol=1e-6 * _size(_dense(other)))
        twice = [one for one in ours if one is not None and one.requires_grad and not one.is_sparse]
        if twice:
            with pytest.raises(lz.InvalidArgument, match=r"layerzero::\w+ has no second derivative"):
                twice[0].sum().backward()
        if sum(tensor.numel() for tensor in given) <= 100 and not any(
            one is not None and one.is_sparse for one in ours
        ):
            is_exact = not sample.kwargs.get("scale_grad_by_freq") and sample.kwargs.get("padding_idx") is None
            if is_exact and sample.kwargs.get("max_norm") is None:
                assert torch.autograd.gradcheck(_of(served.ours, sample, given), given)
        count += 1
    assert count >= served.least


def _of(call: Call, sample: Any, given: list[torch.Tensor]) -> Call:
    """The sample's call, of the tensors that have gradients."""

    def of(*tensors: torch.Tensor) -> torch.Tensor:
        new = {id(old): tensor for old, tensor in zip(given, tensors, strict=True)}

        def ours(a: Any) -> Any:
            return [ours(one) for one in a] if isinstance(a, (list, tuple)) else new.get(id(a), a)

        args = [ours(a) for a in (sample.input, *sample.args)]
        return call(*args, **{name: ours(a) for name, a in sample.kwargs.items()})

    return of


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _dense(tensor: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(()) if tensor is None else tensor.to_dense() if tensor.is_sparse else tensor


@pytest.mark.parametrize("served", SERVED, ids=IDS)
def test_what_is_left_out_is_refused_with_a_reason(served: Served) -> None:
    """And not computed otherwise than torch does."""
    (info,) = [o for o in opinfo.op_db if (o.name, o.variant_test_name) == (served.name, served.variant)]
    for sample in info.sample_inputs("cpu", torch.float32):
        if served.refused(sample):
            with pytest.raises(lz.InvalidArgument, match=";"):
                served.ours(sample.input, *sample.args, **sample.kwargs)
