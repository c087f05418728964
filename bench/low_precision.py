"""Weights of 4 bits that workers keep ready, and mixtures of experts, on the CPU: onnxruntime and MLX beside torch.
Writes results/low_precision.md.

    python bench/low_precision.py [--quick]

As cpu_kernels.py measures. Rows of float32 are there to be compared with: of the same layer, by the same backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from common import backend_versions, finish, own_broker, parser
from cpu_kernels import arrays, row

import layerzero as lz

TOKENS, FEATURES, GROUP = (1, 16, 128), 2048, 128
ROUTED, EXPERTS, EXPERT_FEATURES = (16, 512), 8, 1024
MIXED = (1, 128)


def weight_of_4_bits() -> tuple[Any, ...]:
    """What scaled_linear takes after x, as packed_linear gives it."""
    rng, groups = np.random.default_rng(0), (FEATURES, FEATURES // GROUP)
    codes, zeros = rng.integers(0, 256, (FEATURES, FEATURES // 2), np.uint8), rng.integers(0, 16, groups)
    packed = lz.pack_weight(codes, rng.random(groups, np.float32) / 8, zeros, layout="int4")
    return packed.weight, packed.scale, None, None, None, packed.zero_point


def experts(tokens: int) -> tuple[Any, ...]:
    """The first of eight has no rows."""
    ends = np.linspace(0, tokens, EXPERTS).astype(np.int32)
    return arrays(tokens, EXPERT_FEATURES), arrays(EXPERTS, EXPERT_FEATURES, EXPERT_FEATURES), lz.share(ends)


def mixture(tokens: int) -> tuple[Any, ...]:
    """Eight of 64 small experts for each token."""
    rng, width = np.random.default_rng(0), 512
    ids = np.argsort(rng.random((tokens, 64)), 1)[:, :8]
    weights = arrays(64, 512, width), arrays(64, width, 256)
    return arrays(tokens, width), *weights, lz.share(ids), lz.share(rng.random((tokens, 8), np.float32))


def rows(rounds: int) -> Iterator[list[str]]:
    packed, plain = weight_of_4_bits(), arrays(FEATURES, FEATURES)
    for tokens in TOKENS:
        x, name = arrays(tokens, FEATURES), f"{tokens} x {FEATURES:,} by"
        for backend in ("onnxruntime", "mlx") if tokens == 1 else ("onnxruntime",):  # MLX has one core
            given = (x, *packed)
            yield row(rounds, f"scaled_linear, {name} 4 bits", backend, "scaled_linear", given, weight_format="int4")
        yield row(rounds, f"linear, {name} float32", "onnxruntime", "linear", (x, plain))
    for tokens in ROUTED:
        name = f"grouped_linear, {tokens} x {EXPERT_FEATURES:,} by {EXPERTS} weights"
        yield row(rounds, name, "onnxruntime", "grouped_linear", experts(tokens))
    for tokens in MIXED:
        yield row(rounds, f"moe_mlp, {tokens} x 512, 8 of 64 experts", "onnxruntime", "moe_mlp", mixture(tokens))


def main() -> None:
    args = parser(__doc__, "ten rounds").parse_args()
    with own_broker():
        found = list(rows(10 if args.quick else 30))
        versions = backend_versions()
    finish(
        "low_precision",
        "Weights of 4 bits and mixtures of experts, on the CPU",
        versions,
        ["call", "by", "its", "torch's", "torch's / its", "chosen after tuning"],
        found,
        [
            f"Weights of {FEATURES:,} x {FEATURES:,}, of 4 bits in groups of {GROUP} with zero points. Medians; the "
            "ratio is the median of those of the rounds. Below 1 torch is faster.",
            "Predicted of onnxruntime's 4 bits: 0.7 ms for 1 row, 2.3 for 16, 13 for 128, of which 0.25 compare the "
            "weight with its copy. Before they were constants: 18.6, 13.9 and 33.2 ms.",
        ],
        is_quick=args.quick,
    )


if __name__ == "__main__":
    main()
