"""A GPU as PyTorch sees it: blocks as tensors, the caller's streams, memory of captured graphs. Used by every provider
whose library works on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from layerzero.workers.provider import Bind, Block, Bound, Call, DeviceMemory
from layerzero.workers.providers._sequences import checked_ends
from layerzero.workers.providers._torch_ops import Builder, Run, any_scale, binder

# What attention kernels load at once; they check no addresses, and a misaligned load ends the process' context.
ALIGNMENT_BYTES = 16


class _Capturable:
    """A Bound, and the memory of its graphs."""

    def __init__(self, torch: Any, bound: Bound) -> None:
        self._torch, self._bound = torch, bound
        self._pool: Any = None  # one for all its graphs: they run in turn

    def __call__(self) -> None:
        torch = self._torch
        if not torch.cuda.is_current_stream_capturing():
            self._bound()
            return
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool):
            self._bound()

    def release(self) -> None:
        self._pool = None


class TorchCuda:
    """`torch` with gradients off and its context made. Raises RuntimeError where it has no GPU."""

    def __init__(self, torch: Any) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"torch {torch.__version__} has no CUDA device: it was built for CUDA {torch.version.cuda}, and the "
                "driver gives it none"
            )
        torch.set_grad_enabled(False)
        torch.cuda.init()
        self.torch = torch
        self._streams: dict[tuple[int, int], Any] = {}  # by GPU: the default stream has one handle on all

    def view(self, block: Block) -> Any:
        """The block's memory as a tensor, without a copy."""
        torch, spec, memory = self.torch, block.spec, block.device
        dtype = getattr(torch, spec.dtype)
        device = torch.device("cuda", memory.device)
        if spec.numel == 0:
            return torch.empty(spec.shape, dtype=dtype, device=device)
        # As bytes: the interface has no bfloat16.
        flat = torch.as_tensor(_Bytes(memory, spec.span_bytes), device=device)
        if flat.data_ptr() != memory.pointer:
            raise RuntimeError(f"torch copied {spec} from GPU {memory.device} in place of viewing it")
        return flat.view(dtype).as_strided(spec.shape, spec.strides)

    def on_stream(self, stream: int) -> AbstractContextManager[None]:
        """Inside, torch enqueues on this stream (a CUDA handle)."""
        device = self.torch.cuda.current_device()
        found = self._streams.get((device, stream))
        if found is None:
            cuda = self.torch.cuda  # to its ExternalStream 0 is no stream, and it takes one of its own
            found = cuda.ExternalStream(stream, device=device) if stream else cuda.default_stream(device)
            self._streams[device, stream] = found
        context: AbstractContextManager[None] = self.torch.cuda.stream(found)
        return context

    def binds(self, builders: Mapping[str, Builder]) -> dict[str, Bind]:
        """The kernels of a backend, by id."""
        return {kernel_id: self._capturable(binder(self.torch, self.view, b)) for kernel_id, b in builders.items()}

    def _capturable(self, bind: Bind) -> Bind:
        """Keep what a kernel allocates while it is captured.

        Torch's allocator would hand the memory to later calls, which a replay then overwrites.
        """

        def bind_capturable(call: Call, inputs: Sequence[Block | None], outputs: Sequence[Block]) -> Bound:
            return _Capturable(self.torch, bind(call, inputs, outputs))

        return bind_capturable

    def attention(self, forward: Callable[..., Any]) -> Builder:
        """A Builder from `forward(q, k, v, is_causal, scale)`, which has every tensor as (B, S, H, D) with one D.

        For libraries that take no mask. Their own rule for causal calls is the descriptor's.
        """
        forward = any_scale(forward)

        def build(views: Sequence[Any], call: Call) -> Run:
            q, k, v, *_ = views
            queries, keys, wide = q.shape[2], k.shape[2], v.shape[3]
            if keys == 0:  # every row is fully masked
                return lambda out: out.zero_()
            is_causal, scale = bool(call.attrs["is_causal"]), call.attrs["scale"]
            is_bottom_right = is_causal and call.attrs["causal_alignment"] == "bottom_right"
            # Rows that see no key are left out: torch's kernel, which xFormers calls too, is wrong in others with them.
            hidden = max(queries - keys, 0) if is_bottom_right else 0
            # So are keys that no row sees: xFormers lets a lone query of grouped heads see them all.
            seen = queries if is_causal and not is_bottom_right else keys
            tensors = (q[:, :, hidden:], k[:, :, :seen], v[:, :, :seen])
            inputs = [self.aligned(tensor, max(q.shape[3], wide)) for tensor in tensors]

            def run(out: Any) -> None:
                q, k, v = (give().transpose(1, 2) for give in inputs)
                result = forward(q, k, v, is_causal, scale=scale)
                out[:, :, hidden:].copy_(result[..., :wide].transpose(1, 2))
                if hidden:
                    out[:, :, :hidden].zero_()

            return run

        return build

    def attention_varlen(self, forward: Callable[..., Any]) -> Builder:
        """A Builder from `forward(q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal, scale)`, for libraries that read the
        ends of sequences on the GPU, and believe them: nobody waits to refuse what leads outside, so the ends are bent
        to go from 0 up to the number of tokens and never down. They get every tensor with one head_dim."""
        forward = any_scale(forward)

        def build(views: Sequence[Any], call: Call) -> Run:
            q, k, v, *ends = views
            if len(k) == 0 or len(ends[0]) < 2:
                return lambda out: out.zero_()
            wide = v.shape[2]
            inputs = [self.aligned(tensor, max(q.shape[2], wide)) for tensor in (q, k, v)]
            is_causal, scale = bool(call.attrs["is_causal"]), call.attrs["scale"]

            def run(out: Any) -> None:
                starts = (self._bent(tensor, len(tokens)) for tensor, tokens in zip(ends, (q, k), strict=True))
                out.copy_(forward(*(give() for give in inputs), *starts, is_causal, scale=scale)[..., :wide])

            return run

        return build

    def _bent(self, ends: Any, tokens: int) -> Any:
        """Ends of sequences that lead nowhere else: the first 0, the last all tokens, the others between, none below
        one before it. Made of nothing that was there before: a lifted call has only its inputs."""
        bent = self.torch.clamp(ends, 0, tokens)
        bent[:1].zero_()
        bent[-1:].fill_(tokens)
        return bent.cummax(0).values.to(self.torch.int32)

    def attention_varlen_on_host(self, forward: Callable[..., Any], width: Callable[[int], int]) -> Builder:
        """A Builder from `forward(q, k, v, ends_q, ends_k, call, scale)`, for libraries that want the ends of sequences
        as lists: it waits for the GPU. They get every tensor with one head_dim, `width` of the largest, and no query
        that sees no key."""
        forward = any_scale(forward)

        def build(views: Sequence[Any], call: Call) -> Run:
            q, k, v, *ends = views
            wide = v.shape[2]
            dim = width(max(q.shape[2], wide))
            read_k, read_v = (self.aligned(tensor, dim) for tensor in (k, v))

            def run(out: Any) -> None:
                given = zip(ends, (q, k), ("cu_seqlens_q", "cu_seqlens_k"), strict=True)
                ends_q, ends_k = (checked_ends(tensor.tolist(), len(tokens), name) for tensor, tokens, name in given)
                rows, ends_q = visible_rows(ends_q, ends_k, call)

                def attend(seeing: Any) -> Any:
                    queries = self.aligned(seeing, dim)()
                    found = forward(queries, read_k(), read_v(), ends_q, ends_k, call, scale=call.attrs["scale"])
                    return found[..., :wide]

                if not rows:
                    out.zero_()
                elif len(rows) == len(q):
                    out.copy_(attend(q))
                else:
                    chosen = self.torch.tensor(rows, device=q.device)
                    result = attend(q.index_select(0, chosen))
                    out.zero_()
                    out[chosen] = result

            return run

        return build

    def side_by_side(self, one: Any, other: Any) -> Any:
        """The (..., 2 * n) tensor whose halves these two (..., n) are, without a copy; None if they are not."""
        *lead, columns = one.shape
        whole = self.torch.empty((*lead, 2 * columns), device="meta")
        if one.stride() != other.stride() or one.stride() != whole.stride():
            return None
        start, nbytes = one.data_ptr(), whole.numel() * one.element_size()
        if other.data_ptr() != start + columns * one.element_size():
            return None
        flat = self.torch.as_tensor(_Bytes(DeviceMemory(start, nbytes, one.device.index), nbytes), device=one.device)
        return flat.view(one.dtype).view(whole.shape)

    def aligned(self, tensor: Any, width: int = 0) -> Callable[[], Any]:
        """A function that gives the tensor where kernels can load its rows 16 bytes at a time, else a copy of what it
        holds at that time. Rows that are shorter than `width` get zeros at their end."""
        missing = width - tensor.shape[-1]
        if missing > 0:
            return lambda: self.torch.nn.functional.pad(tensor, (0, missing))
        if is_aligned(tensor):
            return lambda: tensor
        return lambda: tensor.clone(memory_format=self.torch.contiguous_format)


def visible_rows(ends_q: Sequence[int], ends_k: Sequence[int], call: Call) -> tuple[list[int], list[int]]:
    """The queries that see a key, and the ends of sequences among them."""
    is_bottom_right = call.attrs["is_causal"] and call.attrs["causal_alignment"] == "bottom_right"
    rows: list[int] = []
    ends = [0]
    for n in range(len(ends_q) - 1):
        queries, keys = ends_q[n + 1] - ends_q[n], ends_k[n + 1] - ends_k[n]
        hidden = queries if keys == 0 else max(queries - keys, 0) if is_bottom_right else 0
        rows += range(ends_q[n] + hidden, ends_q[n + 1])
        ends.append(len(rows))
    return rows, ends


def is_aligned(tensor: Any) -> bool:
    """Every row is without gaps and starts at a multiple of 16 bytes."""
    rows = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return (
        (tensor.shape[-1] == 1 or tensor.stride(-1) == 1)
        and tensor.data_ptr() % ALIGNMENT_BYTES == 0
        and all(n == 1 or stride * tensor.element_size() % ALIGNMENT_BYTES == 0 for n, stride in rows)
    )


class _Bytes:
    """The CUDA Array Interface, version 3, of some bytes. No stream: the caller has ordered the memory already."""

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.pointer, False),  # torch refuses read-only memory
            "strides": None,
            "version": 3,
            "stream": None,
        }
