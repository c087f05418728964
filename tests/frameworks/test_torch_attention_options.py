"""Windows, soft cap, sinks, slopes, and a mask beside the causal rule, as torch's programs have them: results and
gradients against plain torch in float64, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.frameworks.torch_cases import random

import layerzero as lz
from layerzero.torch.attention import BY_FORMULA

ops = torch.ops.layerzero
QKV = ((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, 8))
SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.0625]])
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (2, 1)},
    "causal window": {"window_size": (3, -1), "is_causal": True, "causal_alignment": "bottom_right"},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "slopes": {"alibi_slopes": SLOPES, "causal_alignment": "bottom_right"},
    "mask and causal": {"is_causal": True, "attn_mask": torch.arange(9) % 3 != 1},
}
BLOCKS = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]]).bool().expand(2, 1, 3, 3)
OPTIONS["blocks"] = {"attn_mask": BLOCKS, "mask_block_size": (2, 4)}
OPTIONS["blocks and causal"] = {**OPTIONS["blocks"], **OPTIONS["causal window"]}
OPTIONS["all"] = {
    **OPTIONS["causal window"],
    **OPTIONS["softcap"],
    **OPTIONS["sinks"],
    "alibi_slopes": SLOPES,
    "attn_mask": random(2, 1, 6, 9, seed=9),
}


def plain(q: Any, k: Any, v: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What docs/ops.md says, in plain torch; torch's autograd gives its gradients."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    shift = k.shape[2] - q.shape[2] if options.get("causal_alignment") == "bottom_right" else 0
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - shift
    if (slopes := options.get("alibi_slopes")) is not None:
        scores = scores - slopes[..., None, None] * distance.abs()
    if (mask := options.get("attn_mask")) is not None:
        if size := options.get("mask_block_size"):
            mask = mask.repeat_interleave(size[0], 2).repeat_interleave(size[1], 3)[:, :, : q.shape[2], : k.shape[2]]
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    left, right = options.get("window_size", (-1, -1))
    hidden = (distance < -left if left >= 0 else distance < -99) | (distance > right if right >= 0 else distance > 99)
    hidden = hidden | (distance > 0 if options.get("is_causal") else hidden)
    scores = torch.where(hidden, -math.inf, scores)
    if (sinks := options.get("sinks")) is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None])[..., : k.shape[2]] @ v, lse


def made(dtype: torch.dtype, name: str, *, needs_grad: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors and other options of a call."""
    tensors = {one: random(*shape, seed=n, dtype=dtype) for n, (one, shape) in enumerate(zip("qkv", QKV, strict=True))}
    rest = dict(OPTIONS[name])
    for one in ("attn_mask", "sinks", "alibi_slopes"):
        if one in rest:
            value = rest.pop(one)
            is_free = one == "alibi_slopes" or value.dtype == torch.bool
            tensors[one] = value.clone() if is_free else value.to(dtype)
    for one in tensors.values():
        if needs_grad and one.dtype.is_floating_point:
            one.requires_grad_()
    return tensors, rest


def order(tensors: dict[str, Any], rest: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """As torch.ops.layerzero.attention has them: tensors by position."""
    names = ("q", "k", "v", "attn_mask")
    given = [*(tensors.get(one) for one in names), 0.0, rest.get("is_causal", False), None, True]
    given += [tensors.get("sinks"), tensors.get("alibi_slopes")]
    return given, {name: value for name, value in rest.items() if name != "is_causal"}


@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients_are_those_of_plain_torch(name: str) -> None:
    """Gradients of every tensor that has some, sinks, slopes and a float mask among them, and their report."""
    tensors, rest = made(torch.float64, name, needs_grad=True)
    args, options = order(tensors, rest)
    out = ops.attention(*args, **options)
    assert lz.last_report().op == "attention_forward"
    leaves = [one for one in tensors.values() if one.requires_grad]
    grad = random(*out.shape, seed=5, dtype=torch.float64)
    found = torch.autograd.grad(out, leaves, grad)
    right, _ = plain(**tensors, **rest)
    torch.testing.assert_close(out, right, rtol=0, atol=1e-12)
    for one, other in zip(found, torch.autograd.grad(right, leaves, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 if one.dtype == torch.float32 else 1e-11)
    assert (lz.last_report().kernel_id == BY_FORMULA) == (name not in ("mask and causal", "blocks"))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_lse_has_windows_caps_slopes_and_sinks_in_it(name: str, backend: str) -> None:
    tensors, rest = made(torch.float32, name, needs_grad=False)
    out, lse = lz.attention_forward(**tensors, **rest, enable_gqa=True, backend=backend)
    right = plain(
        **{one: value if value.dtype == torch.bool else value.double() for one, value in tensors.items()}, **rest
    )
    torch.testing.assert_close((out.double(), lse.double()), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["window", "all"])
def test_compiled_mapped_and_in_autocast(name: str) -> None:
    tensors, rest = made(torch.float32, name, needs_grad=False)
    args, options = order(tensors, rest)
    expected = ops.attention(*args, **options)
    compiled = torch.compile(lambda *given: ops.attention(*given, **options) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args), expected * 2)
    written = torch.compile(lambda **given: lz.attention(**given, **rest, enable_gqa=True), backend="aot_eager")
    torch.testing.assert_close(written(**tensors), expected)
    mapped = torch.func.vmap(lambda q, k, v: ops.attention(q, k, v, *args[3:], **options))
    pairs = [torch.stack((one, one * 0.5)) for one in args[:3]]
    singly = [ops.attention(*(pair[n] for pair in pairs), *args[3:], **options) for n in range(2)]
    torch.testing.assert_close(mapped(*pairs), torch.stack(singly))
    with torch.autocast("cpu", torch.bfloat16):
        low = ops.attention(*args, **options)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), expected, rtol=0, atol=4e-2)


def test_slopes_are_mapped_over_and_sinks_are_not() -> None:
    q, k, v = (random(3, 2, 4, 5, 8, seed=n) for n in range(3))
    slopes, sinks = torch.rand(3, 4), torch.rand(3, 4)

    def with_slopes(q: Any, k: Any, v: Any, slopes: Any) -> torch.Tensor:
        found: torch.Tensor = ops.attention(q, k, v, None, 0.0, False, None, False, None, slopes)
        return found

    singly = torch.stack([with_slopes(*each) for each in zip(q, k, v, slopes, strict=True)])
    torch.testing.assert_close(torch.func.vmap(with_slopes)(q, k, v, slopes), singly)
    with pytest.raises(lz.InvalidArgument, match="under vmap: sinks is mapped over"):
        torch.func.vmap(lambda q, s: ops.attention(q, q, q, None, 0.0, False, None, False, s))(q, sinks)


@pytest.mark.parametrize("options", [{"window_size": (2, 2)}, {"softcap": 1.0}])
def test_dropout_with_an_option_is_refused(options: dict[str, Any]) -> None:
    """torch's own kernel, which has dropout, would leave the option out."""
    q = random(1, 2, 5, 8)
    with pytest.raises(lz.InvalidArgument, match=r"dropout_p is 0.5 and there are sinks, .* allowed: 0.0 with these"):
        ops.attention(q, q, q, None, 0.5, **options)


def test_dropout_has_a_mask_beside_the_causal_rule() -> None:
    q = torch.ones(1, 1, 4, 2)
    mask = torch.tensor([True, False, True, True])
    out = ops.attention(q, q, torch.arange(4.0).view(1, 1, 4, 1), mask, 1e-12, True)
    torch.testing.assert_close(out.flatten(), torch.tensor([0.0, 0.0, 1.0, 5 / 3]))
