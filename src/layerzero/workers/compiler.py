"""`python -m layerzero.workers.compiler PROVIDER PARENT_PID`: compile a kernel for the call that the Prepare message on
stdin describes, by running it once on made-up inputs.

What is compiled goes to the caches that the environment's variables name. Exit code 0 when the kernel has run; else the
library's words are on stderr. At a low priority, and ends with its parent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from layerzero.ipc.transport import messages
from layerzero.ipc.vocabulary.numerics import pack
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers import boot
from layerzero.workers.certify.memory import Bench, bench_for, room_for
from layerzero.workers.provider import Block, Call

NICE = 10


def main(argv: Sequence[str]) -> int:
    provider, parent = argv
    boot.die_with_parent(int(parent))
    boot.confine(os.environ)
    os.nice(NICE)
    boot.point_stdout_at_stderr()
    message = messages.decode(sys.stdin.buffer.read(), messages.Prepare)
    call = Call(
        message.op,
        message.kernel_id,
        tuple(None if spec is None else TensorSpec.from_wire(spec) for spec in message.inputs),
        tuple(TensorSpec.from_wire(spec) for spec in message.outputs),
        message.attrs,
    )
    kept = boot.enter_cache(os.environ)
    loaded = boot.import_provider(provider).load()
    bench = bench_for(loaded, room_for((*call.inputs, *call.outputs)), message.device)
    inputs, outputs = synthetic(bench, call)
    bench.run(loaded.kernels[call.kernel_id](call, inputs, outputs))
    if kept is not None:
        kept.seal()
    return 0


def synthetic(bench: Bench, call: Call) -> tuple[list[Block | None], list[Block]]:
    """Inputs that the op admits, and outputs. Of data any numbers will do; indices point to something that is there."""
    op = OPS[call.op]
    given = dict(zip(op.inputs, call.inputs, strict=True))
    blocks: list[Block | None] = []
    written: list[Block] = []
    for name, spec in given.items():
        if spec is None:
            blocks.append(None)
        elif name in op.in_place:
            block, target = bench.in_place(spec, bytes(spec.numel * spec.itemsize))
            blocks.append(block)
            written.append(target)
        elif name in op.indices:
            blocks.append(bench.input(spec, pack(_indices(name, spec, given), spec.dtype)))
        elif spec.dtype == "bool":
            blocks.append(bench.input(spec, b"\1" * spec.numel))
        else:
            blocks.append(bench.filled(spec))
    return blocks, written or [bench.output(spec) for spec in call.outputs]


def _indices(name: str, spec: TensorSpec, given: dict[str, TensorSpec | None]) -> Sequence[int]:
    """Sequences of equal lengths, and caches that are full; 0 is an index of everything else."""
    if name in ("cu_seqlens_q", "cu_seqlens_k"):
        packed = given[name[-1]]
        assert packed is not None, "it is not optional"
        return [packed.shape[0] * n // max(spec.numel - 1, 1) for n in range(spec.numel)]
    cache, tables = given.get("k_cache"), given.get("block_tables")
    if name == "block_tables" and cache is not None:
        return [n % max(cache.shape[0], 1) for n in range(spec.numel)]
    if name == "seq_lens" and cache is not None and tables is not None:
        return [cache.shape[1] * tables.shape[1]] * spec.numel
    return [0] * spec.numel


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
