"""Gradient formulas in plain torch: they run in the program's own process, on tensors that it saved itself, so a
worker may die between forward and backward. Those of attention and of norms are ops of ours.

A formula takes the gradient of the op's result and the call, and returns gradients by the names of arguments; those
that nobody needs may be left out. What is summed is summed in float32 for half-precision inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

import layerzero as lz
from layerzero.torch import attention as by_formula
from layerzero.torch import backward, norms

aten = torch.ops.aten
NOT_KEPT = "the log-sum-exp was not kept, under torch.func"
OUTSIDE = "gradients that are differentiated once more, or torch.func"
WITH_OPTIONS = "windows, a soft cap, sinks or slopes, whose gradients no kernel has"
OTHERS = "gradients of a float mask, or gradients that are differentiated once more"


class Kept(NamedTuple):
    """What is kept of calls with the same arguments in need of gradients. Numbers are of arguments by position.

    `needed`: names. `saved`: names and numbers of tensors, OUT and ALSO for results; `only_shapes` and `others`: of the
    arguments that were given, tensors that are not saved, and those that are no tensors. `numbers`: of `saved`.
    `places`: of each name among what was saved and the others. `wanted`: of all arguments the names, "" of those that
    need none."""

    needed: frozenset[str]
    saved: tuple[tuple[str, int], ...]
    only_shapes: tuple[tuple[str, int], ...]
    others: tuple[tuple[str, int], ...]
    numbers: tuple[int, ...]
    places: Mapping[str, int]
    wanted: tuple[str, ...]


class Call:
    """What was kept of a forward call. `call["x"]` is an argument, of a tensor only where the op's table says that it
    is saved; "out" is the result."""

    def __init__(
        self,
        kept: Kept,
        values: Sequence[Any],
        shapes: Sequence[tuple[int, ...] | None],
        options: Mapping[str, Any],
        defaults: Mapping[str, Any],
    ) -> None:
        """`values`: what was saved, and then the others; `shapes`: of the tensors that were not; `options`: arguments
        that were given by name; `defaults`: of those that were not given."""
        self.needs = kept.needed
        self._kept, self._values, self._shapes = kept, values, shapes
        self._options, self._defaults = options, defaults

    def __getitem__(self, name: str) -> Any:
        place = self._kept.places.get(name)
        if place is not None:
            return self._values[place]
        return self._options[name] if name in self._options else self._defaults.get(name)

    @functools.cached_property
    def shape(self) -> Mapping[str, tuple[int, ...]]:
        """Of all tensors."""
        found = {name: shape for (name, _), shape in zip(self._kept.only_shapes, self._shapes, strict=True)}
        saved = zip(self._kept.saved, self._values, strict=False)  # the others follow
        found |= {name: None if one is None else one.shape for (name, _), one in saved}
        return {name: shape for name, shape in found.items() if shape is not None}


Gradients = dict[str, "Tensor | None"]
Formula = Callable[[Any, Call], Gradients]  # of the gradient of the result, or of several those


def silu(grad: Tensor, call: Call) -> Gradients:
    """Elfwing, Uchibe and Doya 2017: s (1 + x (1 - s)) with s the logistic function of x."""
    return {"input": _silu(grad, call["input"])}


def gelu(grad: Tensor, call: Call) -> Gradients:
    """Phi(x) + x phi(x), or that of the approximation by tanh."""
    return {"input": aten.gelu_backward(grad, call["input"], approximate=call["approximate"])}


def swiglu(grad: Tensor, call: Call) -> Gradients:
    """Those of silu(gate) * up."""
    gate, up = call["gate"], call["up"]
    found: Gradients = {}
    if "gate" in call.needs:
        found["gate"] = _silu(grad * up, gate)
    if "up" in call.needs:
        found["up"] = grad * torch.nn.functional.silu(gate)
    return found


def softmax(grad: Tensor, call: Call) -> Gradients:
    """y (g - sum(g y)), in the result's dtype: torch converts it to the input's."""
    out = call["out"]
    return {"input": aten._softmax_backward_data(grad, out, call["dim"], out.dtype)}


def log_softmax(grad: Tensor, call: Call) -> Gradients:
    """g - exp(y) sum(g)."""
    out = call["out"]
    return {"input": aten._log_softmax_backward_data(grad, out, call["dim"], out.dtype)}


def layer_norm(grad: Tensor, call: Call) -> Gradients:
    """By the op layer_norm_backward, which is selected like any other. In this process where what lies outside
    differentiates once more, or maps."""
    args = (grad, call["input"], call["normalized_shape"], call["weight"], call["eps"])
    if _is_formula():
        backward.thread.why = OUTSIDE
        return dict(norms.layer_norm(*args, call.needs))
    pinned = {"backend": call["backend"], "timeout_s": call["timeout_s"]}
    return dict(zip(norms.LAYER_NORM, torch.ops.layerzero.layer_norm_backward.default(*args, **pinned), strict=True))


def rms_norm(grad: Tensor, call: Call) -> Gradients:
    """As layer_norm, by the op rms_norm_backward."""
    return _rms_norm(grad, call["input"], call, call.needs, call["backend"])


def add_rms_norm(grads: Any, call: Call) -> Gradients:
    """Those of rms_norm, of the sum; the sum's own gradient is added, and both terms have all of it. A backend that is
    pinned for the forward call need not have that op: any may serve."""
    by_out, by_sum = grads
    needs = frozenset({"input" if name == "residual" else name for name in call.needs})
    found = _rms_norm(by_out, call["summed"], call, needs, None)
    if "input" in needs:
        by_x = found["input"]
        assert by_x is not None
        found["input"] = found["residual"] = by_x + by_sum
    return found


def _rms_norm(grad: Tensor, x: Tensor, call: Call, needs: frozenset[str], backend: str | None) -> Gradients:
    args = (grad, x, call["normalized_shape"], call["weight"], call["eps"])
    if _is_formula():
        backward.thread.why = OUTSIDE
        return dict(norms.rms_norm(*args, needs))
    pinned = {"backend": backend, "timeout_s": call["timeout_s"]}
    return dict(zip(norms.RMS_NORM, torch.ops.layerzero.rms_norm_backward.default(*args, **pinned), strict=True))


def addmm(grad: Tensor, call: Call) -> Gradients:
    """beta g, summed where it was broadcast, alpha g b^T and alpha a^T g."""
    found: Gradients = {}
    if "input" in call.needs:
        wide = grad if grad.dtype == torch.float64 else grad.float()
        found["input"] = (call["beta"] * wide.sum_to_size(call.shape["input"])).to(grad.dtype)
    if "a" in call.needs:
        found["a"] = call["alpha"] * torch.matmul(grad, call["b"].mT)
    if "b" in call.needs:
        found["b"] = call["alpha"] * torch.matmul(call["a"].mT, grad)
    return found


def linear(grad: Tensor, call: Call) -> Gradients:
    """g W, g^T x and the sum of g. With an activation g is the gradient by what that is applied to, which is computed
    anew: nobody has kept it."""
    x, weight, bias_shape = call["input"], call["weight"], call.shape.get("bias")
    is_vector = len(call.shape["weight"]) == 1
    if call["activation"] is not None:
        made = torch.matmul(x, weight) if is_vector else torch.nn.functional.linear(x, weight)
        grad = through(call["activation"], grad, made if bias_shape is None else made + call["bias"])
    g = grad.unsqueeze(-1) if is_vector else grad
    found: Gradients = {}
    if "input" in call.needs:
        found["input"] = torch.matmul(g, weight.unsqueeze(0) if is_vector else weight)
    if "weight" in call.needs:
        found["weight"] = torch.matmul(_rows(g).t(), _rows(x)).reshape(call.shape["weight"])
    if "bias" in call.needs and bias_shape is not None:
        found["bias"] = _rows(g).sum(0).reshape(bias_shape)
    return found


def gated_mlp(grad: Tensor, call: Call) -> Gradients:
    """Through the two products, whose first is computed anew, as that of linear with an activation is."""
    x, gate_up, activation = call["input"], call["gate_up"], call["activation"]
    gate, up = torch.nn.functional.linear(x, gate_up).chunk(2, -1)
    opened = _activated(activation, gate)
    found: Gradients = {}
    if "down" in call.needs:
        found["down"] = torch.matmul(_rows(grad).t(), _rows(opened * up))
    if call.needs & {"input", "gate_up"}:
        by_hidden = torch.matmul(grad, call["down"])
        by_product = torch.cat((through(activation, by_hidden * up, gate), by_hidden * opened), -1)
        if "input" in call.needs:
            found["input"] = torch.matmul(by_product, gate_up)
        if "gate_up" in call.needs:
            found["gate_up"] = torch.matmul(_rows(by_product).t(), _rows(x))
    return found


def _activated(activation: str, x: Tensor) -> Tensor:
    if activation in ("relu", "silu"):
        made: Tensor = getattr(torch.nn.functional, activation)(x)
        return made
    return torch.nn.functional.gelu(x, approximate=activation.partition("_")[2] or "none")


def through(activation: str, grad: Tensor, x: Tensor) -> Tensor:
    """The gradient by what an activation of linear is applied to."""
    if activation == "relu":
        return grad * (x > 0.0)
    if activation == "silu":
        return _silu(grad, x)
    approximate = activation.partition("_")[2] or "none"
    made: Tensor = aten.gelu_backward(grad, x, approximate=approximate)
    return made


def matmul(grad: Tensor, call: Call) -> Gradients:
    """g b^T and a^T g, summed where leading dimensions were broadcast."""
    a, b = call["a"], call["b"]
    shape_a, shape_b = call.shape["a"], call.shape["b"]
    g = grad
    if len(shape_b) == 1:
        g = g.unsqueeze(-1)
    if len(shape_a) == 1:
        g = g.unsqueeze(-2)
    found: Gradients = {}
    if "a" in call.needs:
        b2 = b.unsqueeze(-1) if b.dim() == 1 else b
        rows = torch.matmul(g, b2.mT)
        found["a"] = _summed(rows, shape_a if len(shape_a) > 1 else (1, *shape_a)).reshape(shape_a)
    if "b" in call.needs:
        a2 = a.unsqueeze(0) if a.dim() == 1 else a
        columns = torch.matmul(a2.mT, g)
        found["b"] = _summed(columns, shape_b if len(shape_b) > 1 else (*shape_b, 1)).reshape(shape_b)
    return found


def rope(grad: Tensor, call: Call) -> Gradients:
    """Of x the rotation back; of the tables what each pair contributes, summed over heads (and the batch)."""
    return _rope(grad, call["x"], call, call.needs)


def rope_qk(grads: Any, call: Call) -> Gradients:
    """Those of rope, of each result; tables have the sum."""
    found: Gradients = {}
    for name, grad in zip("qk", grads, strict=True):
        needs = (call.needs & {"cos", "sin"}) | ({"x"} if name in call.needs else set())
        for key, value in _rope(grad, call[name], call, needs).items():
            target = name if key == "x" else key
            before = found.get(target)
            found[target] = value if before is None or value is None else before + value
    return found


def _rope(grad: Tensor, x: Any, call: Call, needs: Set[str]) -> Gradients:
    cos, sin = call["cos"], call["sin"]
    wide, pairs = _wide(grad.dtype), cos.shape[-1]
    if call["interleaved"]:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    c, s = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    ga, gb = grad[..., first].to(wide), grad[..., second].to(wide)
    found: Gradients = {}
    if "x" in needs:
        back = (ga * c + gb * s, gb * c - ga * s)
        rotated = torch.stack(back, -1).flatten(-2) if call["interleaved"] else torch.cat(back, -1)
        found["x"] = torch.cat((rotated.to(grad.dtype), grad[..., 2 * pairs :]), -1)
    if needs & {"cos", "sin"}:
        a, b = x[..., first].to(wide), x[..., second].to(wide)
        shape = call.shape["cos"]
        found["cos"] = _summed((ga * a + gb * b).sum(-2), shape).to(grad.dtype)
        found["sin"] = _summed((gb * a - ga * b).sum(-2), shape).to(grad.dtype)
    return found


def embedding(grad: Tensor, call: Call) -> Gradients:
    """torch's own: each row's gradients added up."""
    rows, padding, by_count = call.shape["weight"][0], call["padding_idx"], call["scale_grad_by_freq"]
    if call["sparse"]:
        if by_count:
            raise lz.InvalidArgument(
                "layerzero::embedding: sparse and scale_grad_by_freq are both given; allowed for gradients: one of "
                "them; drop one"
            )
        return {"weight": aten.embedding_backward(grad, call["input"], rows, padding, by_count, True)}
    return {"weight": aten.embedding_dense_backward(grad, call["input"], rows, padding, by_count)}


def attention(grad: Tensor, call: Call) -> Gradients:
    """By the op attention_backward, which is selected like any other. In this process, which may take seq_q * seq_k
    numbers for each head: where the log-sum-exp was not kept, for a float mask, with windows, a soft cap, sinks or
    slopes, and where what lies outside differentiates once more."""
    mask = by_formula.of_each(call["attn_mask"], call["mask_block_size"], call["q"], call["k"], call["layout"])
    options = {name: call[name] for name in ("is_causal", "scale", "enable_gqa", "layout", "causal_alignment")}
    beside = {name: call[name] for name in ("window_size", "softcap", "sinks", "alibi_slopes")}
    tensors = call["q"], call["k"], call["v"]
    lse = call["lse"]
    has_options = beside["sinks"] is not None or beside["alibi_slopes"] is not None or bool(beside["softcap"])
    has_options = has_options or tuple(beside["window_size"]) != (-1, -1)
    if lse is None or has_options or "attn_mask" in call.needs or torch.is_grad_enabled():
        found = by_formula.gradients(grad, call["q"], call["k"], call["v"], mask, call.needs, **options, **beside)
        backward.thread.why = NOT_KEPT if lse is None else WITH_OPTIONS if has_options else OTHERS
        if has_options and lse is not None:
            backward.tell("attention_backward", by_formula.BY_FORMULA, f"computed in this process: {WITH_OPTIONS}")
        return dict(found)
    pinned = {"backend": call["backend"], "timeout_s": call["timeout_s"]}
    dq, dk, dv = torch.ops.layerzero.attention_backward.default(
        grad, *tensors, call["out"], lse, mask, **options, **pinned
    )
    return {"q": dq, "k": dk, "v": dv}


def _is_formula() -> bool:
    """Whether something outside differentiates gradients, or maps over them, which ops of ours do not allow."""
    return torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()


def _silu(grad: Tensor, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return aten.silu_backward(grad, x)
    wide = x.to(_wide(x.dtype))  # that kernel is not differentiable itself, and levels of torch.func may ask for that
    s = torch.sigmoid(wide)
    return (grad.to(wide.dtype) * s * (1.0 + wide * (1.0 - s))).to(x.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows(tensor: Tensor) -> Tensor:
    """In 2 dimensions, the last one kept."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


def _summed(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Over the dimensions that `shape` was broadcast along."""
    return tensor.sum_to_size(tuple(shape))
