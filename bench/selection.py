"""What a selection costs in the broker, beside a bare dict hit of the same run. Writes results/selection.md.

    python bench/selection.py [--quick]

No process, no socket: the broker's core is called directly, with 100 synthetic attention kernels of 10 backends.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from common import finish, p50_us, parser, verdict

from layerzero.broker.configuration.settings import Settings
from layerzero.broker.core.state import BrokerState
from layerzero.broker.processes.host import detect_cpu
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec, Signature
from layerzero.capabilities.descriptor import Capability
from layerzero.ipc.transport import messages
from layerzero.ipc.vocabulary.tensors import TensorSpec

BACKENDS, KERNELS = 10, 10
ATTRS = {"is_causal": True, "scale": 0.125, "causal_alignment": "top_left", "layout": "BHSD"}


def capability(number: int) -> Capability:
    """A backend with kernels of many different limits: about half of them accept a call."""
    kernels = [
        {
            "kernel_id": f"b{number}.attention{k}",
            "priority": (7 * number + 3 * k) % 100,
            "source": "synthetic",
            "dtypes": ["float32", "float16"] if k % 3 else ["float16", "bfloat16"],
            "min_ndim": 4,
            "max_ndim": 4,
            "requires_layouts": ["BHSD"] if k % 4 else ["BSHD"],
            "max_head_dim": 64 * (1 + k % 4),
            "head_dim_multiple": 8,
            "max_seq_len": 4096 if k % 5 else None,
            "supports_gqa": bool(k % 2),
            "attn_mask_types": ["bool"],
            "causal_alignments": ["top_left"],
            "masked_rows": "zero",
            "deterministic": True,
        }
        for k in range(KERNELS)
    ]
    return Capability.model_validate(
        {
            "schema_version": "1.0",
            "backend": f"b{number}",
            "backend_version": "1.0",
            "platform": "cpu",
            "ops": {"attention": kernels},
        }
    )


def route(batch: int, queries: int, dim: int) -> bytes:
    q = TensorSpec.contiguous("float32", (batch, 8, queries, dim)).to_wire()
    return messages.encode(messages.Route(op="attention", inputs=[q, q, q, None], outputs=[q], attrs=ATTRS))


def engine(device: Any) -> Engine:
    return Engine({f"b{n}": capability(n) for n in range(BACKENDS)}, device)


def measure(quick: bool) -> list[tuple[str, str, str, str]]:
    count = 20 if quick else 200
    device = detect_cpu()
    known = engine(device)
    table = {(f"op{n}", n, "float32"): n for n in range(1000)}
    key = ("op500", 500, "float32")
    dict_us = p50_us(lambda: table[key], count, 1000)

    spec = CallSpec.parse(route(1, 128, 64))
    context = known.context(spec)
    signature = Signature(b"", spec, context, known.cell(context), known.kernels("attention"))
    core = BrokerState(known, {}, Settings().limits(), random.Random(0))
    core.signatures.order(signature)
    hit_us = p50_us(lambda: core.signatures.order(signature), count, 1000)

    known.rank(spec, context, {}, 0.0)
    rank_us = p50_us(lambda: known.rank(spec, known.context(spec), {}, 0.0), count, 5)
    context_us = p50_us(lambda: known.context(spec), count, 50)
    cold = []
    for _ in range(count):
        fresh = CallSpec.parse(route(1, 128, 64))
        other = engine(device)
        start = time.perf_counter_ns()
        other.rank(fresh, other.context(fresh), {}, 0.0)
        cold.append(time.perf_counter_ns() - start)
    cold_us = statistics.median(cold) / 1e3

    def row(what: str, us: float, aim: str) -> tuple[str, str, str, str]:
        return what, f"{us:,.2f} us", f"{us / dict_us:,.1f}", aim

    kernels = BACKENDS * KERNELS
    return [
        row("bare dict hit", dict_us, ""),
        row("cached decision", hit_us, f"at most 30: {verdict(hit_us <= 30 * dict_us)}"),
        row("build of the context", context_us, ""),
        row(f"ranking anew, {kernels} kernels, validity cached", rank_us, ""),
        row(f"cold decision, {kernels} kernels", cold_us, f"at most 1 ms: {verdict(cold_us <= 1e3)}"),
    ]


HEADINGS = ("step", "time, p50", "ratio to a dict hit", "aim")


def main() -> None:
    args = parser(__doc__, "a tenth of the runs").parse_args()
    finish("selection", "Cost of a selection", {}, HEADINGS, measure(args.quick), is_quick=args.quick)


if __name__ == "__main__":
    main()
