"""Functions of torch that are taken over, and which of their calls: for each function a rule.

A rule has the function's signature. It returns our op with its arguments, or why the call stays with torch, a text
that is the same for all calls of that kind. Rules must be traceable: torch.compile runs through them. They look at
what is written in a call; `unfit` looks at its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _dispatch_keys
from torch.autograd import forward_ad

from layerzero.client.connection import arena as arenas
from layerzero.torch.acceleration import losses
from layerzero.torch.registration import KERNELS  # defines the ops, too

ops = torch.ops.layerzero
Taken = tuple[Callable[..., Tensor], tuple[Any, ...]]
Planned = Taken | str
DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
BESIDE: Mapping[str, frozenset[torch.dtype]] = {  # of tensors beside the others: masks, indices
    "attention": frozenset((torch.bool,)),
    "cross_entropy": frozenset((torch.int64,)),
    "embedding": frozenset((torch.int32, torch.int64)),
}
_NONE: frozenset[torch.dtype] = frozenset()
_BACKENDS = torch._C._SDPBackend
FLASH, CUDNN = int(_BACKENDS.FLASH_ATTENTION), int(_BACKENDS.CUDNN_ATTENTION)
# What torch itself has: first this, and after a first call on a GPU of Hopper's kind the other (sdp_utils.cpp).
OWN_ORDERS = (
    torch._C._get_sdp_priority_order()[:4],
    [CUDNN, FLASH, int(_BACKENDS.EFFICIENT_ATTENTION), int(_BACKENDS.MATH)],
)
STRIDED = "not row-major: torch's result has its strides, ours has not"
NOT_SHARED = (
    "its table is not in shared memory, where lz.share(model) puts it: each call would take a copy of all of it"
)
NOT_SEEN = "compiled, where it cannot be seen whether its table lies in shared memory"
CHECKPOINTED = "gradients inside of a checkpoint, whose second pass is torch's"
NO_RULE = "autocast on a GPU, where ours is computed in float32 and torch's is not"
NO_FLASH = "sdpa_kernel: flash attention, whose place ours takes, is not allowed or not first"


# What a rule asks of sizes, by which calls are known again (looking.py): which of them are equal, 0 or 1; how
# large they are; or more than can be told of a tensor beforehand, as where it lies.
BY_LABEL, EXACT, NEVER = range(3)


class Rule(NamedTuple):
    """`op`: the name of ours. `plan`: see above. `is_composite`: it is torch's, and attention within it is ours."""

    op: str
    plan: Callable[..., Planned]
    is_composite: bool = False
    of_sizes: int = BY_LABEL


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Planned:
    return ops.linear.default, (input, weight, bias)


def silu(input: Tensor, inplace: bool = False) -> Planned:
    if inplace:
        return "inplace=True"
    return (ops.silu.default, (input,)) if input.is_contiguous() else STRIDED


def gelu(input: Tensor, approximate: str = "none") -> Planned:
    return (ops.gelu.default, (input, approximate)) if input.is_contiguous() else STRIDED


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Planned:
    return plain_softmax(input, dim, dtype)


def plain_softmax(input: Tensor, dim: int | None, dtype: torch.dtype | None = None) -> Planned:
    """That of torch.softmax and Tensor.softmax."""
    return _softmax(ops.softmax.default, input, dim, dtype)


def log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Planned:
    return plain_log_softmax(input, dim, dtype)


def plain_log_softmax(input: Tensor, dim: int | None, dtype: torch.dtype | None = None) -> Planned:
    """That of torch.log_softmax and Tensor.log_softmax."""
    return _softmax(ops.log_softmax.default, input, dim, dtype)


def _softmax(op: Callable[..., Tensor], input: Tensor, dim: int | None, dtype: torch.dtype | None) -> Planned:
    if type(dim) is not int:
        return "dim is not a number"
    if dtype is not None and dtype is not input.dtype:
        if dtype not in DTYPES:
            return "dtype= that is not floating point"
        return _CONVERTED[op], (input, dim, dtype)
    return op, (input, dim)


def _converted_softmax(input: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Of the input in another dtype, which is the result's; autocast has no say in it, as in torch."""
    with torch.autocast(input.device.type, enabled=False):
        found: Tensor = ops.softmax.default(input.to(dtype), dim)
    return found


def _converted_log_softmax(input: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """As _converted_softmax."""
    with torch.autocast(input.device.type, enabled=False):
        found: Tensor = ops.log_softmax.default(input.to(dtype), dim)
    return found


_CONVERTED = {ops.softmax.default: _converted_softmax, ops.log_softmax.default: _converted_log_softmax}


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Planned:
    return ops.layer_norm.default, (input, normalized_shape, weight, bias, eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Planned:
    return ops.rms_norm.default, (input, normalized_shape, weight, eps)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Planned:
    if not input.is_contiguous():
        return STRIDED
    if input.numel() == num_groups:  # a function of torch's refuses these, another does not
        return "one number in each group"
    return ops.group_norm.default, (input, num_groups, weight, bias, eps)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Planned:
    if not use_input_stats or running_mean is not None or running_var is not None:
        return "running statistics of instance_norm"
    if input.dim() < 3 or input.shape[2:].numel() == 1:
        return "instance_norm of one number in each channel, which torch refuses"
    if _is_autocast_on_gpu(input):
        return NO_RULE
    return (ops.instance_norm.default, (input, weight, bias, eps)) if input.is_contiguous() else STRIDED


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Planned:
    if training:
        return "batch_norm in training, which changes running statistics"
    if running_mean is None or running_var is None:
        return "batch_norm without running statistics"
    if running_mean.requires_grad or running_var.requires_grad:
        return "gradients of running statistics, which torch refuses"
    if _is_autocast_on_gpu(input):
        return NO_RULE
    if not input.is_contiguous():
        return STRIDED
    return ops.batch_norm.default, (input, running_mean, running_var, weight, bias, False, momentum, eps)


def _is_autocast_on_gpu(input: Tensor) -> bool:
    return input.device.type != "cpu" and torch.is_autocast_enabled(input.device.type)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Planned:
    if dropout_p > 0.0:
        return "dropout_p above 0"
    if attn_mask is not None and is_causal:
        return "attn_mask and is_causal, of which torch takes one"
    of_query, of_key, of_value = query.shape, key.shape, value.shape  # each look takes as long as all that follows
    ndim = len(of_query)
    if not 2 <= ndim <= 4 or len(of_key) != ndim or len(of_value) != ndim:
        return "tensors of other than 2 to 4 dimensions, or not of one number of them"
    if ndim > 2 and not enable_gqa and of_query[-3] != of_key[-3]:
        return "key and value with other heads than query, without enable_gqa"
    if ndim == 4:
        if not of_query[0] == of_key[0] == of_value[0]:
            return "batches of several sizes"
        if not query.is_contiguous() and query.transpose(1, 2).is_contiguous():
            # Heads beside each other, as a projection leaves them: torch's result lies so, too, and models count on it.
            return by_tokens, (query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return ops.attention.default, (query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)


def by_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    gqa: bool,
    *,
    attend: Callable[..., Tensor] = ops.attention.default,
) -> Tensor:
    """Attention of tensors whose heads lie beside each other, by the op or by what it does below autograd."""
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return attend(q, k, v, mask, 0.0, is_causal, scale, gqa, layout="BSHD").transpose(1, 2)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Planned:
    if max_norm is not None:
        return "max_norm, which changes the table in place"
    if sparse and scale_grad_by_freq:
        return "sparse and scale_grad_by_freq, of which torch's gradients take one"
    if weight.dim() != 2:
        return "a table of other than 2 dimensions"
    row = -1  # of torch's op: no such row
    if padding_idx is not None:
        rows = weight.shape[0]
        if not -rows <= padding_idx < rows:
            return "padding_idx that is no row of the table"
        row = padding_idx + rows if padding_idx < 0 else padding_idx
    return looked_up, (input, weight, row, scale_grad_by_freq, sparse)


def looked_up(
    input: Tensor,
    weight: Tensor,
    row: int,
    by_freq: bool,
    sparse: bool,
    *,
    look_up: Callable[..., Tensor] = ops.embedding.default,
) -> Tensor:
    """Rows of a table, by the op or by what it does below autograd."""
    return look_up(input, weight, padding_idx=row, scale_grad_by_freq=by_freq, sparse=sparse)


# Below autograd the call needs no dispatcher of torch's: the same function, on the kernel that the op ends in.
KERNELS[id(by_tokens)] = partial(by_tokens, attend=KERNELS[id(ops.attention.default)])
KERNELS[id(looked_up)] = partial(looked_up, look_up=KERNELS[id(ops.embedding.default)])


def multi_head_attention(*args: Any, **kwargs: Any) -> Planned:
    return "a function of several ops; its attention alone is taken over"


RULES: Mapping[Any, Rule] = {
    F.scaled_dot_product_attention: Rule("attention", attention),
    F.multi_head_attention_forward: Rule("attention", multi_head_attention, is_composite=True),
    F.linear: Rule("linear", linear),
    F.layer_norm: Rule("layer_norm", layer_norm),
    torch.layer_norm: Rule("layer_norm", layer_norm),
    F.rms_norm: Rule("rms_norm", rms_norm),
    torch.rms_norm: Rule("rms_norm", rms_norm),
    F.group_norm: Rule("group_norm", group_norm, of_sizes=EXACT),
    torch.group_norm: Rule("group_norm", group_norm, of_sizes=EXACT),
    F.instance_norm: Rule("instance_norm", instance_norm),
    F.batch_norm: Rule("batch_norm", batch_norm),
    F.silu: Rule("silu", silu),
    F.gelu: Rule("gelu", gelu),
    F.embedding: Rule("embedding", embedding, of_sizes=NEVER),
    F.softmax: Rule("softmax", softmax),
    torch.softmax: Rule("softmax", plain_softmax),
    Tensor.softmax: Rule("softmax", plain_softmax),
    F.log_softmax: Rule("log_softmax", log_softmax),
    torch.log_softmax: Rule("log_softmax", plain_log_softmax),
    Tensor.log_softmax: Rule("log_softmax", plain_log_softmax),
    F.cross_entropy: Rule("cross_entropy", losses.cross_entropy),
}
OPS = tuple(dict.fromkeys(rule.op for rule in RULES.values()))


def _silu_in_place(input: Tensor) -> Planned:
    return silu(input, inplace=True)


def _embedding_op(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Planned:
    row = None if padding_idx < 0 else padding_idx
    return embedding(indices, weight, row, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _batch_norm_op(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Planned:
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm_op(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Planned:
    return instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


# The ops of torch's that its functions above come to, by name and overload.
OVERRIDDEN: Mapping[str, Rule] = {
    "scaled_dot_product_attention": RULES[F.scaled_dot_product_attention],
    "linear": RULES[F.linear],
    "layer_norm": RULES[F.layer_norm],
    "rms_norm": RULES[F.rms_norm],
    "group_norm": RULES[F.group_norm],
    "instance_norm": Rule("instance_norm", _instance_norm_op),
    "batch_norm": Rule("batch_norm", _batch_norm_op),
    "silu": RULES[F.silu],
    "silu_": Rule("silu", _silu_in_place),
    "gelu": RULES[F.gelu],
    "embedding": Rule("embedding", _embedding_op, of_sizes=NEVER),
    "softmax.int": RULES[torch.softmax],
    "log_softmax.int": RULES[torch.log_softmax],
    "cross_entropy_loss": Rule("cross_entropy", losses.cross_entropy_op),
}
# Torch's own ops that have one of ours within, which is a step of theirs and no call of the program.
AROUND: Mapping[str, str] = {
    "softmax": "scaled_dot_product_attention",
    "batch_norm": "instance_norm",
    "log_softmax": "cross_entropy_loss",
}


def _key_sets() -> dict[int, str]:
    """Of the tensors that are taken: their sets of dispatch keys, as numbers. Sparse, nested, quantized, meta, lazily
    negated tensors and those inside of torch.func have others."""
    found = {}
    for device in ("CPU", "CUDA"):
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
        keys = keys.add(getattr(torch._C.DispatchKey, f"Autocast{device}"))
        found[keys.raw_repr()] = device  # one of inference mode
        for name in ("ADInplaceOrView", f"Autograd{device}"):
            keys = keys.add(getattr(torch._C.DispatchKey, name))
        found[keys.raw_repr()] = device
    return found


KEY_SETS = _key_sets()
_functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def unfit(given: Sequence[Any], op: str) -> str | None:
    """Why the tensors of a call stay with torch; None where they do not. For calls that run now."""
    if _functorch_level() is not None:
        return "inside of a torch.func transform"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if op == "attention" and not is_flash_first():
        return NO_FLASH
    beside = BESIDE.get(op, _NONE)
    device, dtype, index = "", None, -1
    needs_grad = False
    for one in given:
        kind = type(one)
        if kind is not Tensor and kind is not torch.nn.Parameter:
            if isinstance(one, Tensor):
                return f"a {kind.__name__}, which may have a meaning of its own"
            continue
        place = KEY_SETS.get(_dispatch_keys(one).raw_repr())
        if place is None:
            return f"a tensor that is not plain: {one.layout}, {one.device.type}"
        needs_grad |= one.requires_grad
        if not one.numel():
            return "a tensor without elements"
        its = one.dtype
        if its is not dtype and its not in beside:
            if its not in DTYPES:
                return str(its)
            if dtype is not None and not is_autocast():
                return "tensors of several dtypes"
            dtype = dtype or its
        if place == "CPU" and device != "CUDA":
            device = place
        elif device == "CPU" or (device and one.get_device() != index):
            return "tensors of several devices"
        else:
            device, index = place, one.get_device()
    if needs_grad and torch.is_grad_enabled() and is_checkpointed():
        return CHECKPOINTED
    if op == "embedding" and device == "CPU" and arenas.pool.find(given[1].data_ptr(), 1) is None:
        return NOT_SHARED
    return None


def unfit_traced(given: Sequence[Any], op: str) -> str | None:
    """The same while torch traces: what it traces with stands for plain tensors."""
    dtype, beside = None, BESIDE.get(op, _NONE)
    for one in given:
        if not isinstance(one, Tensor):
            continue
        if one.dtype not in DTYPES and one.dtype not in beside:
            return "a dtype that is not floating point"
        if one.device.type not in ("cpu", "cuda") or one.layout is not torch.strided:
            return "a tensor that is not plain"
        if op == "embedding" and one.device.type == "cpu":
            return NOT_SEEN
        if one.dtype in beside:
            continue
        is_other = dtype is not None and one.dtype is not dtype
        if is_other and not torch.is_autocast_enabled(one.device.type):
            return "tensors of several dtypes"
        dtype = dtype or one.dtype
    return None


def is_flash_first() -> bool:
    """Whether torch.nn.attention.sdpa_kernel and the flags leave flash attention its place, or torch the choice."""
    if not torch._C._get_flash_sdp_enabled():
        return False
    if is_flash_first_by_order():
        return True
    order = torch._C._get_sdp_priority_order()
    enabled = {
        int(_BACKENDS.MATH): torch._C._get_math_sdp_enabled,
        int(_BACKENDS.EFFICIENT_ATTENTION): torch._C._get_mem_efficient_sdp_enabled,
        CUDNN: torch._C._get_cudnn_sdp_enabled,
    }
    earlier = order[: order.index(FLASH)] if FLASH in order else order
    return not any(enabled[one]() for one in earlier if one in enabled)


def is_flash_first_by_order() -> bool:
    """Whether the order alone says so, or is torch's own: whatever else is enabled."""
    order = torch._C._get_sdp_priority_order()
    return order[0] == FLASH or order[:4] in OWN_ORDERS


def is_autocast() -> bool:
    found: bool = torch._C._is_any_autocast_enabled()
    return found


def is_checkpointed() -> bool:
    """Whether what is saved for backward is computed anew there, outside of us: torch compares what both save."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
