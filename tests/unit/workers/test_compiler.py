"""workers/compiler.py: made-up inputs that an op admits."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.ipc.vocabulary.numerics import gather, unpack
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.certify.memory import HostBench, room_for
from layerzero.workers.compiler import synthetic
from layerzero.workers.provider import Call


def numbers(op: str, **given: TensorSpec) -> dict[str, list[float] | None]:
    """The elements of each input."""
    specs = tuple(given.get(name) for name in OPS[op].inputs)
    bench = HostBench(room_for(specs))
    blocks, _ = synthetic(bench, Call(op, "k", specs, (), {}))
    found: dict[str, Any] = {}
    for name, block in zip(OPS[op].inputs, blocks, strict=True):
        found[name] = None if block is None else unpack(gather(block.host, block.spec), block.spec.dtype)
    return found


def tensor(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec.contiguous(dtype, shape)


def test_sequences_end_where_the_packed_tensor_does() -> None:
    """Kernels read as far as they are told to."""
    q, ends = tensor(10, 2, 8), tensor(4, dtype="int32")
    found = numbers("attention_varlen", q=q, k=q, v=q, cu_seqlens_q=ends, cu_seqlens_k=ends)
    assert found["cu_seqlens_q"] == found["cu_seqlens_k"] == [0, 3, 6, 10]


def test_blocks_of_a_cache_are_there() -> None:
    """One that is not would be another allocation's memory."""
    cache, tables = tensor(3, 16, 2, 8), tensor(2, 4, dtype="int32")
    found = numbers(
        "paged_attention",
        q=tensor(2, 4, 8),
        k_cache=cache,
        v_cache=cache,
        block_tables=tables,
        seq_lens=tensor(2, dtype="int32"),
    )
    assert found["block_tables"] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert found["seq_lens"] == [64, 64]


def test_ids_are_in_the_table() -> None:
    """0 always is."""
    assert numbers("embedding", ids=tensor(3, dtype="int64"), weight=tensor(5, 2))["ids"] == [0, 0, 0]


def test_masks_let_through_and_what_is_left_out_stays_so() -> None:
    """A kernel may take another path for rows without keys."""
    q = tensor(1, 1, 2, 4)
    assert numbers("attention", q=q, k=q, v=q)["attn_mask"] is None
    mask = numbers("attention", q=q, k=q, v=q, attn_mask=tensor(1, 1, 2, 2, dtype="bool"))["attn_mask"]
    assert mask == [True] * 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_data_is_finite(dtype: str) -> None:
    """NaN would have kernels on the CPU take slow paths, and some raise."""
    x = numbers("silu", x=TensorSpec(dtype, (4, 3), (5, 1)))["x"]
    assert x is not None
    assert all(abs(value) < 1 for value in x)


def test_inputs_are_read_only() -> None:
    """As in a worker: a kernel that writes to them must not look compiled and well."""
    bench = HostBench(4096)
    (block,), (out,) = synthetic(bench, Call("silu", "k", (tensor(4),), (tensor(4),), {}))
    assert block is not None
    assert (block.host.readonly, out.host.readonly) == (True, False)


def test_what_an_op_writes_in_place_is_one_tensor() -> None:
    """append_kv stores into the caches that it was given, in slots that they have."""
    cache, new, slots = tensor(2, 4, 1, 8), tensor(3, 1, 8), tensor(3, dtype="int64")
    specs = (new, new, cache, cache, slots, None, None)
    bench = HostBench(room_for(specs))
    inputs, outputs = synthetic(bench, Call("append_kv", "k", specs, (cache, cache), {}))
    outputs[0].host[:4] = b"once"
    assert inputs[2] is not None
    assert bytes(inputs[2].host[:4]) == b"once"
    assert numbers("append_kv", key=new, value=new, k_cache=cache, v_cache=cache, slots=slots)["slots"] == [0, 0, 0]
