"""Calls of every op of torch.ops.layerzero, small ones, for tests that hold for each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from layerzero.ipc.vocabulary.ops import ACTIVATIONS, LINEAR_ACTIVATIONS

Case = tuple[tuple[Any, ...], dict[str, Any]]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, needs_grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(needs_grad)


def cases(dtype: torch.dtype = torch.float32, needs_grad: bool = False) -> dict[str, list[Case]]:
    """Arguments by the name of the op; new tensors at each call."""

    def t(*shape: int, seed: int = 0) -> torch.Tensor:
        return random(*shape, seed=seed, dtype=dtype, needs_grad=needs_grad)

    def positive(*shape: int) -> torch.Tensor:
        return (random(*shape, seed=8).abs() + 0.5).to(dtype).requires_grad_(needs_grad)

    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    tables, lengths = torch.tensor([[1, 0], [2, 1]], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    in_eight_bits = [(random(2, 4, 2, dim, seed=dim) * 32).to(torch.int8) for dim in (8, 6)]
    of_three = [(random(3, 2, 2, 8, seed=n) * 4).to(torch.float8_e5m2) for n in (1, 2)]
    steps = torch.tensor([0.25, 0.5]), torch.tensor([0.125])
    mask = random(3, 5, seed=9) > 0
    mask[1] = False  # a row that sees nothing
    over_a_dimension: list[Case] = [
        ((t(3, 4), -1), {}),
        ((t(2, 3, 4), 1), {}),
        ((t(), 0), {}),
        ((t(3, 0), 1), {}),
        ((t(3, 4), 0), {"dtype": "float64"}),
    ]
    return {
        "silu": [((t(3, 4),), {}), ((t(),), {}), ((t(0, 4),), {}), ((t(4, 6)[::2].t(),), {})],
        "gelu": [((t(3, 4),), {}), ((t(3, 4), "tanh"), {})],
        "swiglu": [((t(3, 4), t(3, 4, seed=1)), {}), (tuple(t(3, 8).chunk(2, -1)), {})],
        "geglu": [((t(3, 4), t(3, 4, seed=1)), {}), ((t(3, 4), t(3, 4, seed=1), "tanh"), {})],
        "reglu": [((t(3, 4), t(3, 4, seed=1)), {}), (tuple(t(3, 8).chunk(2, -1)), {})],
        **{op: [((t(3, 4),), {}), ((t(),), {}), ((t(0, 4),), {})] for op in ACTIVATIONS},
        "softmax": over_a_dimension,
        "log_softmax": over_a_dimension,
        "add_rms_norm": [
            ((t(3, 4), t(3, 4, seed=2), [4], t(4, seed=1), 1e-4), {}),
            ((t(2, 3, 4), t(2, 3, 4, seed=2), [3, 4]), {}),
            ((t(3, 2, 4).transpose(0, 1), t(2, 3, 4, seed=2), [4]), {}),
            ((t(0, 4), t(0, 4), [4], t(4)), {}),
        ],
        "group_norm": [
            ((t(2, 4, 3), 2, t(4, seed=1), t(4, seed=2), 1e-4), {}),
            ((t(2, 4, 3, 2), 4, None, t(4, seed=2)), {}),
            ((t(3, 4), 2, t(4, seed=1)), {}),
            ((t(0, 4, 3), 2), {}),
            ((t(2, 4, 3), 2, t(4, seed=1), t(4, seed=2), 1e-4, "silu"), {}),
        ],
        "instance_norm": [
            ((t(2, 4, 3), t(4, seed=1), t(4, seed=2), 1e-4), {}),
            ((t(2, 4, 3, 2), None, t(4, seed=2)), {}),
            ((t(2, 3, 4).transpose(1, 2),), {}),
        ],
        "batch_norm": [
            ((t(2, 4, 3), t(4, seed=1), positive(4), t(4, seed=2), t(4, seed=3), False, 0.1, 1e-4), {}),
            ((t(2, 4, 3, 2), t(4, seed=1), positive(4), None, t(4, seed=3)), {}),
            ((t(3, 4), t(4, seed=1), positive(4), t(4, seed=2)), {}),
            ((t(0, 4, 3), t(4, seed=1), positive(4)), {}),
        ],
        "layer_norm": [
            ((t(3, 4), [4], t(4, seed=1), t(4, seed=2), 1e-4), {}),
            ((t(2, 3, 4), [3, 4]), {}),
            ((t(2, 3, 4), [4], None, t(4, seed=2)), {}),
            ((t(2, 3, 4), [4], t(4, seed=1)), {}),
        ],
        "rms_norm": [((t(3, 4), [4], t(4, seed=1), 1e-4), {}), ((t(2, 3, 4), [3, 4]), {}), ((t(4), [4], t(4)), {})],
        "layer_norm_backward": [
            ((t(3, 4), t(3, 4, seed=1), [4], t(4, seed=2), 1e-4), {}),
            ((t(2, 3, 4).transpose(0, 1), t(3, 2, 4, seed=1), [2, 4]), {}),
            ((t(0, 4), t(0, 4), [4], t(4, seed=2)), {}),
        ],
        "rms_norm_backward": [
            ((t(3, 4), t(3, 4, seed=1), [4], t(4, seed=2), 1e-4), {}),
            ((t(2, 3, 4).transpose(0, 1), t(3, 2, 4, seed=1), [2, 4]), {}),
            ((t(4), t(4, seed=1), [4]), {}),
        ],
        "linear": [
            ((t(3, 4), t(5, 4, seed=1), t(5, seed=2)), {}),
            ((t(2, 3, 4), t(5, 4, seed=1)), {}),
            ((t(4), t(5, 4, seed=1), t(5, seed=2)), {}),
            ((t(3, 4), t(4, seed=1), t(seed=2)), {}),
            ((t(0, 4), t(5, 4, seed=1), t(5, seed=2)), {}),
            *(((t(2, 3, 4), t(5, 4, seed=1), t(5, seed=2), name), {}) for name in LINEAR_ACTIVATIONS),
            ((t(3, 4), t(5, 4, seed=1), None, "gelu"), {}),
            ((t(3, 4), t(4, seed=1), t(seed=2), "silu"), {}),
        ],
        "matmul": [
            ((t(3, 4), t(4, 5, seed=1)), {}),
            ((t(2, 1, 3, 4), t(6, 4, 5, seed=1)), {}),
            ((t(4), t(4, 5, seed=1)), {}),
            ((t(2, 3, 4), t(4, seed=1)), {}),
            ((t(4), t(4, seed=1)), {}),
        ],
        "gated_mlp": [
            *(((t(2, 3, 4), t(10, 4, seed=1), t(6, 5, seed=2), name), {}) for name in LINEAR_ACTIVATIONS),
            ((t(4), t(10, 4, seed=1), t(4, 5, seed=2)), {}),
            ((t(4, 3).t(), t(10, 4, seed=1), t(5, 6, seed=2).t()), {}),
            ((t(0, 4), t(10, 4, seed=1), t(4, 5, seed=2)), {}),
        ],
        "grouped_linear": [
            ((t(4, 6).t(), t(3, 5, 4, seed=1), torch.tensor([2, 2, 5], dtype=torch.int32), t(3, 5, seed=2)), {}),
        ],
        "moe_route": [
            ((t(3, 8),), {"top_k": 2}),
            (
                (t(3, 8), random(8, seed=1)),
                {"top_k": 3, "scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5},
            ),
        ],
        "moe_permute": [((t(3, 4), torch.tensor([[0, 2], [2, -1], [1, 0]])), {"num_experts": 3})],
        "moe_combine": [((t(6, 4), torch.tensor([5, 1, 0, 2, 4, 3]), random(3, 2, seed=1)), {})],
        "moe_mlp": [
            (
                (
                    *(t(3, 4), t(3, 10, 4, seed=1), t(3, 6, 5, seed=2)),
                    *(torch.tensor([[0, 2], [2, -1], [1, 0]]), random(3, 2, seed=3)),
                ),
                {},
            ),
        ],
        "addmm": [
            ((t(5, seed=2), t(3, 4), t(4, 5, seed=1)), {}),
            ((t(3, 1, seed=2), t(3, 4), t(4, 5, seed=1)), {"beta": 0.5, "alpha": -2.0}),
            ((t(seed=2), t(3, 4), t(4, 5, seed=1)), {"alpha": 2.0}),
            ((t(3, 5, seed=2), t(4, 3).t(), t(4, 5, seed=1)), {"beta": 0.0}),
            ((t(5, seed=2), t(0, 4), t(4, 5, seed=1)), {}),
        ],
        "conv": [
            ((t(2, 4, 6, 5), t(6, 2, 3, 2, seed=1), t(6, seed=2), [2, 1], [1, 0], [1, 2], 2), {}),
            ((t(2, 4, 7), t(6, 4, 3, seed=1), None, [2], [1]), {}),
            ((t(4, 4, 5, 3), t(4, 1, 2, 2, 2, seed=1), t(4, seed=2), [1], [1], [1], 4), {}),
            ((t(2, 3, 6, 5), t(4, 3, 3, 2, seed=1), t(4, seed=2), [1], [2, 0, 0, 1]), {}),
            *(
                ((t(2, 3, 7), t(4, 3, 3, seed=1), t(4, seed=2), [1], [1], [1], 1, name), {})
                for name in LINEAR_ACTIVATIONS
            ),
            ((t(0, 3, 7), t(4, 3, 3, seed=1)), {}),
        ],
        "conv_transpose": [
            ((t(2, 4, 5, 6), t(4, 3, 3, 2, seed=1), t(6, seed=2), [2, 1], [1, 0], [1, 0], 2, [1, 2]), {}),
            ((t(2, 4, 7), t(4, 6, 3, seed=1), None, [2], [1]), {}),
            ((t(3, 3, 5, 3), t(3, 1, 2, 2, 2, seed=1), t(3, seed=2), [1], [1], [0], 3), {}),
            ((t(2, 3, 6, 5), t(3, 4, 3, 3, seed=1), t(4, seed=2), [2], [2, 0, 0, 1]), {}),
            ((t(2, 3, 7), t(3, 4, 3, seed=1), t(4, seed=2), [2], [1], [1], 1, [1], "gelu"), {}),
            ((t(0, 3, 7), t(3, 4, 3, seed=1)), {}),
        ],
        "max_pool": [
            ((t(2, 3, 6, 5), [3, 2], [2, 1], [1, 0], [1, 2], True), {}),
            ((t(2, 3, 7), [3]), {}),
            ((t(2, 3, 4, 5, 3), [2], [1], [1, 0, 1, 0, 1, 0]), {}),
        ],
        "avg_pool": [
            ((t(2, 3, 6, 5), [3, 2], [2, 1], [1, 0], True, False), {}),
            ((t(2, 3, 7), [3], [2], [1]), {}),
            ((t(2, 3, 4, 5, 3), [2], [1], [1], False, True, 3), {}),
        ],
        **{
            op: [((t(2, 3, 6, 5), [4, 1]), {}), ((t(2, 3, 7), [3]), {}), ((t(2, 3, 4, 5, 3), [2]), {})]
            for op in ("adaptive_max_pool", "adaptive_avg_pool")
        },
        "interpolate": [
            ((t(2, 3, 6, 5), [4, 7]), {}),
            ((t(2, 3, 6, 5), None, [1.5, 0.75], "bilinear"), {}),
            ((t(2, 3, 6, 5), [9, 4], None, "bicubic", True), {}),
            ((t(2, 3, 6, 5), [3, 4], None, "bilinear", None, None, True), {}),
            ((t(2, 3, 6), [9], None, "nearest-exact"), {}),
            ((t(1, 2, 3, 4, 3), None, [2.0, 1.0, 1.5], "trilinear", True, True), {}),
        ],
        "rope": [
            ((t(2, 3, 2, 6), t(3, 2, seed=1), t(3, 2, seed=2)), {}),
            ((t(3, 2, 4), t(3, 2, seed=1), t(3, 2, seed=2)), {"interleaved": True}),
            ((t(2, 3, 2, 4), t(2, 3, 2, seed=1), t(2, 3, 2, seed=2)), {"interleaved": True}),
            ((t(2, 3, 2, 4), t(1, 3, 2, seed=1), t(1, 3, 2, seed=2)), {}),
        ],
        "rope_qk": [
            ((t(2, 3, 3, 6), t(2, 3, 1, 6, seed=3), t(3, 2, seed=1), t(3, 2, seed=2)), {}),
            ((t(2, 3, 2, 4), t(2, 3, 1, 4, seed=3), t(2, 3, 2, seed=1), t(2, 3, 2, seed=2)), {"interleaved": True}),
        ],
        "cross_entropy": [
            ((t(3, 4), torch.tensor([2, -100, 0])), {}),
            (
                (
                    t(2, 4, 3),
                    torch.tensor([[0, 3, 1], [2, 2, 1]]),
                    random(4, seed=1, dtype=dtype).abs(),
                    2,
                    "none",
                    0.25,
                ),
                {},
            ),
            ((t(4), torch.tensor(3, dtype=torch.int32), None, -100, "sum", 0.5), {}),
        ],
        "embedding": [
            ((torch.tensor([[0, 3], [2, 2]]), t(4, 6)), {}),
            ((torch.tensor([1, 2], dtype=torch.int32), t(4, 6)), {"padding_idx": 2, "scale_grad_by_freq": True}),
        ],
        "attention": [
            ((t(2, 4, 3, 8), t(2, 4, 5, 8, seed=1), t(2, 4, 5, 6, seed=2)), {}),
            ((t(2, 4, 3, 8), t(2, 2, 5, 8, seed=1), t(2, 2, 5, 8, seed=2), None, 0.0, True, 0.3, True), {}),
            ((t(3, 8), t(5, 8, seed=1), t(5, 8, seed=2), mask), {}),
            ((t(4, 3, 8), t(4, 5, 8, seed=1), t(4, 5, 8, seed=2), t(1, 3, 5, seed=3)), {}),
            (
                (t(2, 3, 4, 8), t(2, 5, 2, 8, seed=1), t(2, 5, 2, 8, seed=2), None, 0.0, True, None, True),
                {"layout": "BSHD", "causal_alignment": "bottom_right"},
            ),
        ],
        "attention_forward": [
            ((t(2, 4, 3, 8), t(2, 4, 5, 8, seed=1), t(2, 4, 5, 6, seed=2)), {}),
            ((t(3, 8), t(5, 8, seed=1), t(5, 8, seed=2), mask), {}),
            (
                (t(2, 3, 4, 8), t(2, 5, 2, 8, seed=1), t(2, 5, 2, 8, seed=2)),
                {"layout": "BSHD", "causal_alignment": "bottom_right", "is_causal": True, "enable_gqa": True},
            ),
        ],
        "attention_backward": [
            (
                (
                    *(t(2, 4, n, 8, seed=n) for n in (3, 3, 5, 5, 3)),
                    random(2, 4, 3, seed=9),
                ),
                {},
            ),
            (
                (
                    *(t(2, n, h, 8, seed=n) for n, h in ((3, 4), (3, 4), (5, 2), (5, 2), (3, 4))),
                    random(2, 4, 3, seed=9),
                ),
                {"layout": "BSHD", "is_causal": True, "enable_gqa": True, "scale": 0.3},
            ),
        ],
        "merge_attention": [
            ((t(2, 4, 3, 8), random(2, 4, 3), t(2, 4, 3, 8, seed=1), random(2, 4, 3, seed=2)), {}),
            (
                tuple(one for n in range(3) for one in (t(2, 3, 4, 8, seed=n), random(2, 4, 3, seed=n))),
                {"layout": "BSHD"},
            ),
        ],
        "attention_varlen": [((t(5, 4, 8), t(5, 2, 8, seed=1), t(5, 2, 8, seed=2), ends, ends), {"is_causal": True})],
        "paged_attention": [
            ((t(2, 4, 8), t(3, 2, 2, 8, seed=1), t(3, 2, 2, 8, seed=2), tables, lengths), {}),
            ((random(2, 4, 8), *of_three, tables, lengths, *steps), {}),
        ],
        "attention_varlen_forward": [
            (
                (t(5, 4, 8), t(5, 2, 8, seed=1), t(5, 2, 8, seed=2), ends, ends, t(4, seed=3)),
                {"is_causal": True, "window_size": [2, 0]},
            )
        ],
        "paged_attention_forward": [
            (
                (t(5, 4, 8), t(3, 2, 2, 8, seed=1), t(3, 2, 2, 8, seed=2), tables, lengths, ends),
                {"is_causal": True, "softcap": 2.0, "kv_layout": "HND"},
            ),
            ((random(5, 4, 8), *of_three, tables, lengths, ends, None, None, *steps), {"window_size": [1, 0]}),
        ],
        "mla_decode": [
            (
                (t(2, 4, 8), t(2, 4, 6, seed=1), t(3, 2, 8, seed=2), t(3, 2, 6, seed=3), tables, lengths),
                {"scale": 0.25},
            )
        ],
        "gather_kv": [
            ((t(2, 4, 2, 8), t(2, 4, 2, 6, seed=1), torch.tensor([5, -1, 2])), {}),
            ((t(2, 2, 4, 8), t(2, 2, 4, 6, seed=1), torch.tensor([5, -1, 2])), {"kv_layout": "HND"}),
            (
                (*in_eight_bits, torch.tensor([5, -1, 2]), *steps),
                {"dtype": "bfloat16"},
            ),
        ],
        "copy_kv_blocks": [
            ((t(3, 4, 2, 8), t(3, 4, 2, 6, seed=1), torch.tensor([0, -1]), torch.tensor([2, 1])), {}),
        ],
        "append_kv": [
            (
                (
                    t(3, 2, 8),
                    t(3, 2, 6, seed=1),
                    torch.zeros(2, 4, 2, 8, dtype=torch.int8),
                    torch.zeros(2, 4, 2, 6, dtype=torch.int8),
                    torch.tensor([5, -1, 2]),
                    *steps,
                ),
                {},
            ),
            (
                (
                    t(3, 2, 8),
                    t(3, 2, 6, seed=1),
                    t(2, 4, 2, 8, seed=2),
                    t(2, 4, 2, 6, seed=3),
                    torch.tensor([5, -1, 2]),
                ),
                {},
            ),
        ],
        "add": [((t(3, 4), t(3, 4, seed=1)), {}), ((t(3, 1), t(2, 1, 4, seed=1)), {}), ((t(0, 4), t(4, seed=1)), {})],
        "mul": [((t(3, 4), t(3, 4, seed=1)), {}), ((t(4, 3).t(), t(seed=1)), {}), ((t(4), t(2, 3, 4, seed=1)), {})],
        "clamp": [((t(3, 4), -0.5, 0.5), {}), ((t(3, 4), 0.1), {}), ((t(), None, 0.0), {})],
        "where": [
            ((mask[:, :4], t(3, 4), t(3, 4, seed=1)), {}),
            ((mask[:, :1], t(4), t(2, 3, 1, seed=1)), {}),
            ((mask[0, 0], t(seed=3), t(3, 4, seed=1)), {}),
        ],
        "cat": [
            ((t(3, 4), t(3, 2, seed=1)), {"dim": 1}),
            ((t(3, 4), t(1, 4, seed=1), t(2, 4, seed=2)), {}),
            ((t(2, 4, 3).transpose(1, 2), t(2, 3, 4, seed=1)), {"dim": -1}),
            ((t(4),), {}),
        ],
        "cast": [((x,), {"dtype": "float64"}) for x in (t(3, 4), t(4, 3).t(), t(), t(0, 4))],
        "penalize_logits": [
            ((t(3, 5), torch.tensor([[0, 2, 2], [4, -1, 0], [1, 1, 1]]), torch.tensor([1.25])), {}),
            ((t(5), torch.tensor([0, 2]), None, torch.tensor(0.5), torch.tensor([0.25])), {}),
        ],
        "filter_logits": [
            ((t(3, 5), torch.tensor([0.5, 1.0, 2.0]), torch.tensor([2])), {}),
            ((t(3, 5), None, None, torch.tensor(0.75), torch.tensor([0.1])), {}),
        ],
        "sample": [
            ((t(3, 5), torch.tensor([1, 2, 3]), torch.tensor([0]), torch.tensor([0.5]), torch.tensor(3)), {}),
            ((t(5), torch.tensor(7), torch.tensor(1)), {}),
        ],
        "speculative_verify": [
            (
                (
                    t(3, 2, 5).softmax(-1),
                    torch.tensor([[1], [2], [-1]]),
                    None,
                    torch.tensor([1, 2, 3]),
                    torch.tensor(0),
                ),
                {},
            ),
            ((t(2, 5).abs(), torch.tensor([4]), t(1, 5).abs(), torch.tensor([1]), torch.tensor([7])), {}),
        ],
        "tree_accept": [
            ((torch.tensor([[0, 7, 8, 9]]), torch.tensor([[-1, 0, 0, 2]]), torch.tensor([[8, 1, 9, 5]])), {}),
            ((torch.tensor([0, 7]), torch.tensor([-1, 0]), torch.tensor([6, 5])), {}),
        ],
        "quantize": [((random(3, 4), torch.tensor(0.5)), {"dtype": "int8"}), ((random(3, 4), torch.ones(3, 1)), {})],
        "dynamic_quantize": [
            ((random(3, 4),), {}),
            ((random(2, 3, 32),), {"dtype": "uint8", "symmetric": False, "group_size": 8}),
            ((random(3, 4),), {"group_size": 0, "symmetric": False}),
        ],
        "int_matmul": [
            ((_bytes(3, 8), _bytes(8, 5)), {}),
            (
                (_bytes(2, 3, 8), _bytes(8, 5), torch.arange(3, dtype=torch.int32), torch.tensor(2, dtype=torch.int32)),
                {},
            ),
        ],
        "scaled_linear": [
            ((_bytes(3, 8), _bytes(5, 8), torch.ones(5, 1) / 8, torch.ones(3, 1)), {"dtype": "bfloat16"}),
            ((random(3, 8), _bytes(5, 8), torch.tensor(0.25), None, random(5)), {}),
            ((random(8), _bytes(5, 4).view(torch.uint8), torch.ones(5, 2)), {"weight_format": "int4"}),
        ],
        "dequantize": [
            ((torch.arange(-6, 6, dtype=torch.int8).view(3, 4), torch.ones(3, 2)), {}),
            ((random(3, 4).to(torch.float8_e4m3fn), torch.ones(3, 2)), {"dtype": "bfloat16"}),
            ((torch.arange(8, dtype=torch.uint8).view(2, 4).view(torch.float4_e2m1fn_x2), torch.tensor(2.0)), {}),
        ],
    }


def _bytes(*shape: int) -> torch.Tensor:
    return (torch.arange(math.prod(shape)) * 37 % 256 - 128).to(torch.int8).view(shape)


def _group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
) -> torch.Tensor:
    """torch's; of a bias without a weight its backward pass fails (2.13)."""
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)
    made = F.group_norm(x, groups, weight, bias, eps)
    return F.silu(made) if activation == "silu" else made


def _batch_norm(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """The formula: torch gives no gradients by the statistics."""
    beside = (-1, *[1] * (x.dim() - 2))
    normalized = (x - mean.view(beside)) / torch.sqrt(var.view(beside) + eps)
    scaled = normalized if weight is None else normalized * weight.view(beside)
    return scaled if bias is None else scaled + bias.view(beside)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = ""
) -> torch.Tensor:
    return _activated(F.linear(x, weight, bias) if weight.dim() == 2 else x @ weight + bias, activation)


def _activated(made: torch.Tensor, activation: str) -> torch.Tensor:
    after: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
        "silu": F.silu,
    }
    return after[activation](made) if activation else made


def _grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """By a mask for each group."""
    groups = torch.bucketize(torch.arange(len(x)), offsets, right=True)
    found = torch.zeros(len(x), weight.shape[1], dtype=x.dtype)
    for g, each in enumerate(weight):
        made = F.linear(x, each, None if bias is None else bias[g])
        found = torch.where((groups == g).unsqueeze(1), made, found)
    return found


def _gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    gate, up = gate_up.chunk(2)
    return F.linear(_linear(x, gate, None, activation) * F.linear(x, up), down)


def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """As complex numbers, of which the pairs are rotated."""
    pairs = cos.shape[-1]
    head = x[..., : 2 * pairs]
    z = head.unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    z = torch.complex(z[..., 0], z[..., 1]) if interleaved else torch.complex(z[..., 0, :], z[..., 1, :])
    z = z * torch.complex(cos, sin).unsqueeze(-2)
    rotated = torch.stack((z.real, z.imag), -1) if interleaved else torch.stack((z.real, z.imag), -2)
    return torch.cat((rotated.flatten(-2), x[..., 2 * pairs :]), -1)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "BHSD",
    causal_alignment: str = "top_left",
) -> torch.Tensor:
    """torch's, with the layout and the causal rule by hand."""
    if layout == "BSHD":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if is_causal and causal_alignment == "bottom_right":
        rows, columns = q.shape[-2], k.shape[-2]
        mask, is_causal = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows), False
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    out = F.scaled_dot_product_attention(q, k, v, mask, **options)
    return out.transpose(1, 2) if layout == "BSHD" else out


def joined(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Several results as one tensor; those of other heads one after the other. Of integers there are no gradients."""
    if not isinstance(result, tuple):
        return result
    result = tuple(one for one in result if one.is_floating_point())
    if len(result) == 1:
        return result[0]
    is_alike = all(one.shape == result[0].shape for one in result)
    return torch.stack(result) if is_alike else torch.cat(result, -2)


def _conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = (1,),
    padding: Any = (0,),
    dilation: Any = (1,),
    groups: int = 1,
    activation: str = "",
) -> torch.Tensor:
    """Of what was padded before."""
    dims = weight.dim() - 2
    low, high = (
        (padding[:dims], padding[dims:]) if len(padding) > dims else [list(padding) * (dims // len(padding))] * 2
    )
    x = F.pad(x, [n for d in range(dims - 1, -1, -1) for n in (low[d], high[d])])
    convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    return _activated(convolve(x, weight, bias, tuple(stride), 0, tuple(dilation), groups), activation)


def _conv_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = (1,),
    padding: Any = (0,),
    output_padding: Any = (0,),
    groups: int = 1,
    dilation: Any = (1,),
    activation: str = "",
) -> torch.Tensor:
    """With what is cut off, cut off by hand."""
    dims = weight.dim() - 2
    low, high = (
        (padding[:dims], padding[dims:]) if len(padding) > dims else [list(padding) * (dims // len(padding))] * 2
    )
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    made = convolve(x, weight, bias, tuple(stride), 0, tuple(output_padding), groups, tuple(dilation))
    first = made.dim() - dims
    cuts = [slice(low[d], made.shape[first + d] - high[d]) for d in range(dims)]
    return _activated(made[(..., *cuts)], activation)


def _pool(name: str) -> Callable[..., torch.Tensor]:
    def pool(x: torch.Tensor, kernel: Any, stride: Any = (), padding: Any = (0,), *args: Any) -> torch.Tensor:
        """Of uneven padding, what is padded before."""
        dims = x.dim() - 2
        if len(padding) > dims:
            low, high = padding[:dims], padding[dims:]
            ends = [n for d in range(dims - 1, -1, -1) for n in (low[d], high[d])]
            x, padding = F.pad(x, ends, value=-torch.inf), (0,)
        args = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in args)
        made: torch.Tensor = getattr(F, f"{name}{dims}d")(
            x, tuple(kernel), tuple(stride) or None, tuple(padding), *args
        )
        return made

    return pool


def _adaptive(name: str) -> Callable[..., torch.Tensor]:
    def pool(x: torch.Tensor, size: Any) -> torch.Tensor:
        dims = x.dim() - 2
        made: torch.Tensor = getattr(F, f"{name}{dims}d")(x, tuple(size) if len(size) > 1 else size[0])
        return made

    return pool


NATIVE: dict[str, Callable[..., Any]] = {
    "silu": F.silu,
    "gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up, approximate="none": F.gelu(gate, approximate=approximate) * up,
    "reglu": lambda gate, up: F.relu(gate) * up,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "hardswish": F.hardswish,
    "mish": F.mish,
    "softmax": lambda x, dim, dtype=None: F.softmax(x, dim, dtype=getattr(torch, dtype or "", None)),
    "log_softmax": lambda x, dim, dtype=None: F.log_softmax(x, dim, dtype=getattr(torch, dtype or "", None)),
    "add_rms_norm": lambda x, residual, shape, weight=None, eps=None: (
        F.rms_norm(x + residual, shape, weight, eps if x.dtype != torch.float64 or eps is not None else 2.0**-52),
        x + residual,
    ),
    "group_norm": _group_norm,
    "instance_norm": lambda x, weight=None, bias=None, eps=1e-5: F.instance_norm(x, weight=weight, bias=bias, eps=eps),
    "batch_norm": _batch_norm,
    "layer_norm": F.layer_norm,
    "rms_norm": F.rms_norm,
    "linear": _linear,
    "gated_mlp": _gated_mlp,
    "grouped_linear": _grouped_linear,
    "moe_permute": lambda x, ids, num_experts: x[
        torch.argsort(torch.where(ids < 0, num_experts, ids).reshape(-1), stable=True) // ids.shape[1]
    ],
    "moe_combine": lambda rows, order, weights: (
        rows[torch.argsort(order)].unflatten(0, weights.shape) * weights.unsqueeze(-1)
    ).sum(1),
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "interpolate": lambda x, size=None, scale=None, mode="nearest", corners=None, again=None, smooth=False: (
        F.interpolate(x, size, scale, mode, corners, again, smooth)
    ),
    **{op: _pool(op) for op in ("max_pool", "avg_pool")},
    **{op: _adaptive(op) for op in ("adaptive_max_pool", "adaptive_avg_pool")},
    "addmm": torch.addmm,
    "add": torch.add,
    "mul": torch.mul,
    "clamp": torch.clamp,
    "where": torch.where,
    "cat": lambda *tensors, dim=0: torch.cat(tensors, dim),
    "cast": lambda x, dtype: x.to(getattr(torch, dtype)),
    "matmul": torch.matmul,
    "embedding": F.embedding,
    "cross_entropy": lambda x, target, weight=None, ignore_index=-100, reduction="mean", smoothing=0.0: F.cross_entropy(
        x, target.long(), weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing
    ),
    "rope": _rope,
    "rope_qk": lambda q, k, *tables, interleaved=False: tuple(_rope(x, *tables, interleaved) for x in (q, k)),
    "attention": _attention,
}
"""torch's own function for each op, or the formula of docs/ops.md in torch."""
