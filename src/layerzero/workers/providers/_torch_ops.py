"""Ops in PyTorch that are the same on every device. Used by torch_cpu.py, torch_cuda.py and _torch_staged.py."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.workers.provider import Bind, Block, Bound, Call
from layerzero.workers.providers._sequences import checked_ends

Run = Callable[[Any], Any]  # fills the tensor, or of ops with several outputs each of the list, that it is given
Builder = Callable[[Sequence[Any], Call], Run]  # of the inputs' views, None where one is left out

# Ops whose kernels write any strides themselves; the others get a contiguous tensor, see binder().
_WRITES_STRIDED = frozenset(
    {"attention", "attention_varlen", "paged_attention", "rope", "softmax"}
    | {"add", "mul", "clamp", "where", "cat", "cast"}
    | {"quantize", "dequantize", "int_matmul", "scaled_linear"}
)
_TINY, _HUGE = 2.0**-100, 2.0**126


def host_view(torch: Any) -> Callable[[Block], Any]:
    """A function that gives the memory of blocks on the CPU as tensors, without a copy."""
    with warnings.catch_warnings():  # torch says once in a process that memory cannot be written: that of inputs is so
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        torch.frombuffer(bytes(1), dtype=torch.uint8)

    def view(block: Block) -> Any:
        spec = block.spec
        dtype = getattr(torch, spec.dtype)
        if spec.numel == 0:
            return torch.empty(spec.shape, dtype=dtype)
        flat = torch.frombuffer(block.host, dtype=torch.uint8, count=spec.span_bytes).view(dtype)
        return flat.as_strided(spec.shape, spec.strides)

    return view


def binder(torch: Any, view: Callable[[Block], Any], build: Builder) -> Bind:
    """A Bind that gives `build` the blocks as tensors, and its run an output that it can write."""

    def bind(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
        views = [None if block is None else view(block) for block in inputs]
        if len(OPS[call.op].outputs) > 1:  # each run fills all of them, or the parts that it says
            targets = [view(block) for block in outputs]
            write = build(views, call)
            return lambda: write(targets)
        out = view(outputs[0])
        if out.numel() == 0:
            return lambda: None
        run = build(views, call)
        # With strides that do not collapse, the out= forms of gelu, linear and matmul fail or write the wrong
        # elements (torch 2.13).
        is_direct = call.op in _WRITES_STRIDED or out.is_contiguous()

        def bound() -> None:
            if is_direct:
                run(out)
                return
            dense = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            run(dense)
            out.copy_(dense)

        return bound

    return bind


def in_place(torch: Any, activation: str) -> Run:
    """An activation of linear, of a tensor that it changes."""
    aten = torch.ops.aten
    found: dict[str, Run] = {
        "relu": aten.relu_.default,
        "gelu": lambda x: gelu(torch, x, "none", x),
        "gelu_tanh": functools.partial(aten.gelu_.default, approximate="tanh"),
        "silu": aten.silu_.default,
    }
    return found[activation]


def gelu(torch: Any, x: Any, approximate: str, out: Any) -> Any:
    """torch's gelu, into `out`, which may be x. On CPUs with AVX-512 it is oneDNN's, which gives NaN for infinity and
    infinity for half of the largest number (2.13): these are put in after. Of NaN in x that costs the same."""
    kernel = functools.partial(torch.ops.aten.gelu.out, approximate=approximate)
    is_native = approximate != "none" or not x.is_cpu or x.dtype not in (torch.float32, torch.bfloat16)
    if is_native or not x.numel() or float(x.max()) <= _HUGE:
        return kernel(x, out=out)
    above = x > _HUGE
    large = x[above]
    kernel(x, out=out)
    out[above] = large
    return out


def plain_scale(scale: float) -> tuple[float, float]:
    """What to multiply queries by, and a scale that gives the same scores then, and that kernels take: they hide keys
    by -inf and multiply then, which makes NaN of it by 0, and +inf by less. What is 0 in float32 is 0, and ZenDNN's
    word for none."""
    if scale > _TINY:
        return 1.0, scale
    return (-1.0, -scale) if scale < -_TINY else (scale, 1.0)


def times(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tensor * factor


def any_scale(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward(q, ..., scale=)` of a kernel that takes plain scales alone, of any."""

    def run(q: Any, *others: Any, scale: float, **options: Any) -> Any:
        factor, scale = plain_scale(scale)
        return forward(times(q, factor), *others, scale=scale, **options)

    return run


def any_scale_backward(backward: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Likewise `backward(grad_out, q, ..., scale=)`, which gives the gradients of q, k and v."""

    def run(grad_out: Any, q: Any, *others: Any, scale: float, **options: Any) -> Sequence[Any]:
        factor, scale = plain_scale(scale)
        grad_q, *found = backward(grad_out, times(q, factor), *others, scale=scale, **options)
        return [times(grad_q, factor), *found]

    return run


class TorchOps:
    """One method per op, each a Builder. `sdpa` is scaled_dot_product_attention, or one of its implementations."""

    def __init__(self, torch: Any, sdpa: Callable[..., Any]) -> None:
        self.torch = torch
        self.sdpa = sdpa

    def builders(self) -> Mapping[str, Builder]:
        """Every op but attention, paged_attention and append_kv, by name."""
        return {
            "attention_varlen": self.attention_varlen,
            "rope": self.rope,
            "rope_qk": self.rope_qk,
            "matmul": self.matmul,
            "addmm": self.addmm,
            "linear": self.linear,
            "gated_mlp": self.gated_mlp,
            "softmax": self.softmax,
            "log_softmax": self.log_softmax,
            "layer_norm": self.layer_norm,
            "rms_norm": self.rms_norm,
            "add_rms_norm": self.add_rms_norm,
            "gelu": self.gelu,
            "silu": self.silu,
            "swiglu": self.swiglu,
            "embedding": self.embedding,
        }

    def attention_varlen(self, views: Sequence[Any], call: Call) -> Run:
        """One sequence after the other. Reads their ends on the host: on a GPU it waits for them."""
        q, k, v, *ends = views
        is_causal, scale = call.attrs["is_causal"], call.attrs["scale"]
        is_bottom_right = call.attrs["causal_alignment"] == "bottom_right"

        def run(out: Any) -> None:
            (starts_q, starts_k) = (
                checked_ends(given.tolist(), len(tokens), name)
                for given, tokens, name in zip(ends, (q, k), ("cu_seqlens_q", "cu_seqlens_k"), strict=True)
            )
            for n in range(len(starts_q) - 1):
                rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
                self.attend(q[rows], k[keys], v[keys], out[rows], is_causal, is_bottom_right, scale)

        return run

    def attend(self, q: Any, k: Any, v: Any, out: Any, is_causal: bool, is_bottom_right: bool, scale: float) -> None:
        """Attention of one sequence, all tensors (tokens, heads, extent)."""
        queries, keys = len(q), len(k)
        if not queries or not keys:
            out.zero_()
            return
        mask = None
        if is_causal and is_bottom_right and queries != keys:
            is_causal = False
            mask = self.torch.ones(queries, keys, dtype=self.torch.bool, device=q.device).tril_(keys - queries)
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        is_grouped = q.shape[1] != k.shape[1]
        result = self.sdpa(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped)
        out.copy_(result[0].transpose(0, 1))

    def rope(self, views: Sequence[Any], call: Call) -> Run:
        x, cos, sin = views
        rotated = 2 * cos.shape[2]
        wide = self.torch.float64 if x.dtype == self.torch.float64 else self.torch.float32
        if call.attrs["interleaved"]:
            places = slice(0, rotated, 2), slice(1, rotated, 2)
        else:
            places = slice(0, rotated // 2), slice(rotated // 2, rotated)

        def run(out: Any) -> None:
            a, b = (x[..., place].to(wide) for place in places)
            c, s = (table.to(wide).unsqueeze(2) for table in (cos, sin))
            out[..., places[0]] = a * c - b * s
            out[..., places[1]] = b * c + a * s
            out[..., rotated:] = x[..., rotated:]

        return run

    def rope_qk(self, views: Sequence[Any], call: Call) -> Run:
        q, k, *tables = views
        runs = [self.rope((x, *tables), call) for x in (q, k)]

        def run(targets: Any) -> None:
            for one, out in zip(runs, targets, strict=True):
                one(out)

        return run

    def matmul(self, views: Sequence[Any], call: Call) -> Run:
        a, b = views
        return lambda out: self.torch.matmul(a, b, out=out)

    def addmm(self, views: Sequence[Any], call: Call) -> Run:
        (x, a, b), beta, alpha = views, call.attrs["beta"], call.attrs["alpha"]
        return lambda out: self.torch.addmm(x, a, b, beta=beta, alpha=alpha, out=out)

    def linear(self, views: Sequence[Any], call: Call) -> Run:
        """With an activation two kernels of torch, the second in place on what the first has made."""
        x, weight, bias = views
        aten, activation = self.torch.ops.aten, call.attrs["activation"]
        if not activation:
            return lambda out: aten.linear.out(x, weight, bias, out=out)
        activate = in_place(self.torch, activation)

        def run(out: Any) -> None:
            aten.linear.out(x, weight, bias, out=out)
            activate(out)

        return run

    def gated_mlp(self, views: Sequence[Any], call: Call) -> Run:
        """Gates and others by one product, then three more kernels of torch."""
        x, gate_up, down = views
        aten, activate = self.torch.ops.aten, in_place(self.torch, call.attrs["activation"])

        def run(out: Any) -> None:
            gate, up = self.torch.nn.functional.linear(x, gate_up).chunk(2, -1)
            activate(gate)
            aten.linear.out(gate * up, down, None, out=out)

        return run

    def softmax(self, views: Sequence[Any], call: Call) -> Run:
        (x,), dim = views, call.attrs["dim"]
        if not call.attrs["dtype"]:
            return lambda out: self.torch.softmax(x, dim, out=out)
        dtype = getattr(self.torch, call.attrs["dtype"])
        return lambda out: self.torch.softmax(x, dim, dtype=dtype, out=out)

    def log_softmax(self, views: Sequence[Any], call: Call) -> Run:
        (x,), dim = views, call.attrs["dim"]
        if not call.attrs["dtype"]:
            return lambda out: self.torch.ops.aten._log_softmax.out(x, dim, False, out=out)
        dtype = getattr(self.torch, call.attrs["dtype"])
        return lambda out: self.torch.log_softmax(x, dim, dtype=dtype, out=out)

    def layer_norm(self, views: Sequence[Any], call: Call) -> Run:
        x, weight, bias = views
        shape, eps = x.shape[x.ndim - call.attrs["ndim"] :], call.attrs["eps"]
        return lambda out: out.copy_(self.torch.nn.functional.layer_norm(x, shape, weight, bias, eps))

    def rms_norm(self, views: Sequence[Any], call: Call) -> Run:
        x, weight = views
        shape, eps = x.shape[x.ndim - call.attrs["ndim"] :], call.attrs["eps"]
        return lambda out: out.copy_(self.torch.nn.functional.rms_norm(x, shape, weight, eps))

    def add_rms_norm(self, views: Sequence[Any], call: Call) -> Run:
        x, residual, weight = views
        shape, eps = x.shape[x.ndim - call.attrs["ndim"] :], call.attrs["eps"]

        def run(targets: Any) -> None:
            out, summed = targets
            self.torch.add(x, residual, out=summed)
            out.copy_(self.torch.nn.functional.rms_norm(summed, shape, weight, eps))

        return run

    def gelu(self, views: Sequence[Any], call: Call) -> Run:
        (x,), approximate = views, call.attrs["approximate"]
        return lambda out: gelu(self.torch, x, approximate, out)

    def silu(self, views: Sequence[Any], call: Call) -> Run:
        (x,) = views
        return lambda out: self.torch.ops.aten.silu.out(x, out=out)

    def swiglu(self, views: Sequence[Any], call: Call) -> Run:
        gate, up = views
        return lambda out: self.torch.mul(self.torch.nn.functional.silu(gate), up, out=out)

    def embedding(self, views: Sequence[Any], call: Call) -> Run:
        """Reads the ids' range on the host, because a bad id is the caller's error: on a GPU it waits for them."""
        ids, weight = views
        rows, columns = weight.shape

        def run(out: Any) -> None:
            chosen = ids.reshape(-1).clone()  # the caller can write to its own while they are used
            low, high = (int(bound) for bound in self.torch.aminmax(chosen))
            if low < 0 or high >= rows:
                bad = low if low < 0 else high
                raise InvalidArgument(
                    f"check the ids of embedding: {bad} is outside [0, {rows}), the rows of weight",
                    id=bad,
                    num_embeddings=rows,
                )
            self.torch.index_select(weight, 0, chosen, out=out.view(-1, columns))

        return run


def as_bits(torch: Any, tensor: Any) -> Any:
    """The same memory as integers: many kernels know no 8-bit floats, and to move numbers needs none."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
