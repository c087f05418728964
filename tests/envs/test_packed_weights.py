"""Weights of 4 bits in the layouts of GPTQ and AWQ, packed here as AutoGPTQ and AutoAWQ pack them, against the numbers
that they were packed from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests import reference
from tests.envs.harness import Harness

import layerzero as lz
from layerzero.ipc.vocabulary.tensors import TensorSpec

pytestmark = [pytest.mark.usefixtures("installation"), pytest.mark.timeout(600)]
BACKENDS = ["torch", "mlx", "onnxruntime"]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
rng = np.random.default_rng(5)


def layer(layout: str, k: int, n: int, groups: int, *, has_order: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """Numbers of a layer in float64, (n, k), and the tensors that a library stores of it."""
    low = layout == "gptq"  # whose zero points are from 1 on: it stores them less 1
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(low, 16, (groups, n))
    scales = (rng.random((groups, n)) / 8).astype(np.float16)
    of = np.arange(k) // (k // groups)
    if has_order:
        of = rng.permutation(of)
    numbers = scales.astype(np.float64)[of] * (codes - zeros[of])
    qzeros, qweight = np.zeros((groups, n // 8), np.uint32), np.zeros((k // 8, n), np.uint32)
    if layout == "awq":  # AutoAWQ, WQLinear_GEMM.from_linear
        qweight = np.zeros((k, n // 8), np.uint32)
        for column in range(n // 8):
            for place, which in enumerate(AWQ_ORDER):
                qweight[:, column] |= codes[:, 8 * column + which].astype(np.uint32) << np.uint32(4 * place)
                qzeros[:, column] |= zeros[:, 8 * column + which].astype(np.uint32) << np.uint32(4 * place)
        return numbers.T, (qweight.view(np.int32), scales, qzeros.view(np.int32))
    for row in range(k):  # AutoGPTQ, QuantLinear.pack
        qweight[row // 8] |= codes[row].astype(np.uint32) << np.uint32(4 * (row % 8))
    for column in range(n):
        qzeros[:, column // 8] |= (zeros[:, column] - low).astype(np.uint32) << np.uint32(4 * (column % 8))
    return numbers.T, (qweight.view(np.int32), scales, qzeros.view(np.int32), of.astype(np.int32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
def test_a_layer_is_what_it_was_packed_from(layout: str, backend: str) -> None:
    """Of several shapes, long rows among them, also with inputs that do not lie by group (act-order), and a bias."""
    for k, n, groups, has_order in (
        (640, 16, 5, False),
        (64, 16, 2, False),
        (128, 8, 1, False),
        (96, 24, 8, layout != "awq"),
    ):
        numbers, stored = layer(layout, k, n, groups, has_order=has_order)
        packed = lz.pack_weight(*stored, layout=layout)
        assert (packed.out_features, packed.in_features, packed.group_size) == (n, k, k // groups)
        assert (packed.order is not None) == has_order
        x, bias = rng.standard_normal((2, 3, k)).astype(np.float32), rng.standard_normal(n).astype(np.float32)
        found = lz.packed_linear(x, packed, bias, backend=backend)
        assert reference.error(found, x.astype(np.float64) @ numbers.T + bias) <= 1e-5
        half = lz.packed_linear(x.astype(np.float16), packed, backend=backend)
        assert half.dtype == np.float16
        assert reference.error(half, x.astype(np.float16).astype(np.float64) @ numbers.T) <= 2e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_that_somebody_writes_into_counts_as_it_is_now(backend: str) -> None:
    """Backends keep what they have made of a weight: numbers, scales and zero points are changed in turn."""
    packed = lz.pack_weight(*layer("awq", 64, 16, 2)[1], layout="awq")
    x = np.eye(64, dtype=np.float32)
    for array in (packed.weight, packed.scale, packed.zero_point):
        for _ in range(2):
            lz.packed_linear(x, packed, backend=backend)
        array[7, 1] += 1
        codes = np.stack((packed.weight & 15, packed.weight >> 4), -1).reshape(16, 2, 32).astype(np.float64)
        numbers = (codes - packed.zero_point[..., None]) * packed.scale[..., None]
        found = lz.packed_linear(x, packed, backend=backend)
        assert reference.error(found, numbers.reshape(16, 64).T) <= 1e-5


def test_a_weight_is_kept_once_by_its_id_and_checked() -> None:
    _, stored = layer("awq", 64, 16, 2)
    one, other = (lz.pack_weight(*stored, layout="awq") for _ in range(2))
    assert one is other is lz.packed_weight(one.id)
    plain = lz.pack_weight(one.weight, one.scale, one.zero_point, layout="int4")
    assert plain is one
    changed = lz.pack_weight(stored[0] + 1, *stored[1:], layout="awq")
    assert changed.id != one.id
    one.weight[0, 0] ^= 1
    with pytest.raises(lz.InvalidArgument, match=f"packed weight {one.id[:12]} has changed: .*; pack it again"):
        lz.packed_weight(one.id)
    fresh = lz.pack_weight(*stored, layout="awq")
    assert fresh is not one, "its numbers are not those that were asked for"
    fresh.check()
    one.weight[0, 0] ^= 1
    one.check()
    identity = one.id
    del one, other, plain, fresh
    with pytest.raises(lz.InvalidArgument, match="is kept here; pack it with lz"):
        lz.packed_weight(identity)


@pytest.mark.parametrize(
    ("layout", "change", "says"),
    [
        ("marlin", {}, "layout is 'marlin'; allowed: 'gptq' or"),
        ("gptq", {0: np.zeros((8, 16), np.int64)}, "qweight is int64; allowed: int32"),
        ("gptq", {1: np.ones((2, 16), np.int32)}, "scales is int32; allowed: floats"),
        ("gptq", {1: np.ones((2, 15), np.float16)}, r"scales has shape \[2, 15\]; allowed: \(groups of 64 in"),
        ("gptq", {2: np.zeros((2, 3), np.int32)}, r"qzeros has shape \[2, 3\]; allowed: \[2, 2\]"),
        ("gptq", {3: np.zeros(64, np.int32)}, "g_idx has groups of unequal sizes; allowed: 32 of each of 2"),
        ("gptq", {3: np.full(64, 7)}, "g_idx has groups of unequal sizes"),
        ("gptq", {0: np.zeros(8, np.int32)}, r"qweight has shape \[8\]; allowed: two dimensions"),
        ("awq", {}, "g_idx is given for layout 'awq'; allowed: None"),
        ("int4", {}, "g_idx is given for layout 'int4'"),
    ],
)
def test_what_does_not_belong_together_is_refused(layout: str, change: dict[int, Any], says: str) -> None:
    stored = list(layer("gptq", 64, 16, 2)[1])
    for place, tensor in change.items():
        stored[place] = tensor
    if layout == "awq":
        stored[0] = np.zeros((64, 2), np.int32)
    with pytest.raises(lz.InvalidArgument, match=says):
        lz.pack_weight(*stored, layout=layout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("points", [(8, 8), (0, 15), (15, 15), (0, 16), (-300, 300), (-(2**31), 2**31 - 1)])
def test_groups_rows_and_zero_points_at_their_edges(points: tuple[int, int], backend: str) -> None:
    """Libraries have kernels for groups of some sizes, for few rows and for many, and for zero points of 4 bits."""
    for m, groups, size, n in (
        (1, 1, 16, 3),
        (17, 3, 16, 5),
        (2, 5, 32, 1),
        (3, 3, 48, 4),
        (33, 2, 160, 6),
        (1, 4, 6, 2),
    ):
        weight = rng.integers(0, 256, (n, groups * size // 2)).astype(np.uint8)
        scale = np.exp(rng.standard_normal((n, groups)) - 3).astype(np.float32) * rng.choice([-1, 1], (n, 1))
        zeros = rng.integers(points[0], points[1] + 1, (n, groups)).astype(np.int32)
        zeros[0, 0], zeros[-1, -1] = points
        packed = lz.pack_weight(weight, scale.astype(np.float32), zeros, layout="int4")
        codes = np.stack((weight & 15, weight >> 4), -1).reshape(n, groups, size).astype(np.float64)
        numbers = ((codes - zeros[..., None]) * scale[..., None].astype(np.float64)).reshape(n, -1)
        x = rng.standard_normal((m, groups * size)).astype(np.float32)
        found = lz.packed_linear(x, packed, backend=backend)
        assert reference.error(found, x.astype(np.float64) @ numbers.T) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("greatest", [np.inf, 3e37])
def test_a_scale_beyond_what_products_of_its_numbers_have(greatest: float, backend: str) -> None:
    """Kernels may take a scaled zero point from a scaled number: of infinite ones that is none."""
    scale = np.ones((16, 2), np.float32)
    scale[3, 0] = greatest
    weight = np.full((16, 32), 0x99, np.uint8)  # 9, of which 8 is the zero point
    for zero in (8, 11, 18):
        packed = lz.pack_weight(weight, scale, np.full((16, 2), zero, np.int32), layout="int4")
        x = np.full((2, 64), 2.0**-9, np.float32)
        expected = (9.0 - zero) * scale.astype(np.float64).sum(1) * 32 * 2.0**-9
        found = lz.packed_linear(x, packed, backend=backend)
        np.testing.assert_allclose(found, np.stack([expected, expected]), rtol=1e-5)


@pytest.mark.parametrize(("kernel", "most_mib"), [("torch.scaled_linear", 30), ("onnxruntime.scaled_linear.int4", 8)])
def test_a_weight_that_has_no_place_is_multiplied_by_as_well(
    kernel: str, most_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two the first is kept; what the other stands for is made at each call, some rows after the others."""
    monkeypatch.setenv("LAYERZERO_WORKER_WEIGHTS_MIB", str(most_mib))
    n, k, groups = 1100, 4096, 32
    x, scale = rng.standard_normal((2, k), np.float32), rng.random((n, groups), np.float32) / 8
    zeros, bias = rng.integers(0, 16, (n, groups), np.int32), rng.standard_normal(n, np.float32)
    weights = [rng.integers(0, 256, (n, k // 2), np.uint8) for _ in range(2)]
    given = [x, weights[0], scale, None, bias, None, zeros]
    specs = [None if one is None else TensorSpec.contiguous(one.dtype.name, one.shape) for one in given]
    blobs = [b"" if one is None else one.tobytes() for one in given]
    sets = [[blobs[0], weight.tobytes(), *blobs[2:]] for weight in (*weights, *weights)]
    attrs, out = {"dtype": "", "weight_format": "int4"}, [TensorSpec.contiguous("float32", (2, n))]
    harness = Harness(kernel.partition(".")[0])
    try:
        reply, made = harness.run(kernel, "scaled_linear", specs, out, attrs, sets)
    finally:
        harness.close()
    assert not reply.get("error")
    assert made[:2] == made[2:]
    for weight, found in zip(weights, made, strict=False):
        codes = np.stack((weight & 15, weight >> 4), -1).reshape(n, groups, -1).astype(np.float32)
        numbers = ((codes - zeros[..., None]) * scale[..., None]).reshape(n, k).astype(np.float64)
        expected = x.astype(np.float64) @ numbers.T + bias
        assert reference.error(np.frombuffer(found, np.float32).reshape(2, n), expected) <= 1e-5
