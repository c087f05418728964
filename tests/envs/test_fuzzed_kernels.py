"""The short form of `make fuzz TARGET=kernels`: a few calls of some kernels of each environment; and that it notices
what a kernel does wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests import reference
from tests.envs.harness import Harnesses
from tests.fuzz import kernels

from layerzero.capabilities.descriptor import KernelCapability
from layerzero.ipc.vocabulary.numerics import pack, unpack
from layerzero.ipc.vocabulary.tensors import TensorSpec

BACKENDS = ("mlx", "numba", "onnxruntime", "openblas", "torch")
KERNELS, EXAMPLES = 8, 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_made_up_calls_give_the_reference_result(harnesses: Harnesses, backend: str) -> None:
    """Extents, strides, offsets, odd numbers and shared memory that no list of cases has thought of."""
    known = list(kernels.targets(backend))
    counts, found = Counter[str](), {}
    for target in random.Random(1).sample(known, min(KERNELS, len(known))):
        wrong: dict[str, tuple[int, str]] = {}
        kernels.try_kernel(harnesses, target, EXAMPLES, 1, counts, wrong)
        found |= {(target.kernel.kernel_id, target.dtype): wrong} if wrong else {}
    assert found == {}
    assert counts["calls"]


class _Kernel:
    """relu in float32, which does to its results what `spoil` says."""

    def __init__(self, spoil: Any) -> None:
        self._spoil = spoil

    def run(self, kernel_id: str, op: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec],
            attrs: Any, sets: Sequence[Sequence[bytes]], offsets: Any, alias: Any) -> Any:  # fmt: skip
        values = [one if one != one else max(one, 0.0) for one in unpack(sets[0][0], "float32")]
        memory = bytearray(pack(values, "float32"))
        return {}, [self._spoil(memory)]


def _one_off(memory: bytearray) -> bytes:
    memory[:4] = pack([float.fromhex("0x1p+9")], "float32")
    return bytes(memory)


@pytest.mark.parametrize(
    ("spoil", "says"), [(bytes, ""), (_one_off, "error"), (lambda memory: bytes(memory[:-4]), "bytes of")]
)
def test_fuzzing_notices_what_a_kernel_does_wrong(monkeypatch: pytest.MonkeyPatch, spoil: Any, says: str) -> None:
    """A comparison that lets all pass would find nothing for ever."""
    given = {"kernel_id": "lib.relu", "priority": 1, "source": "test", "dtypes": ["float32"], "deterministic": True}
    kernel = KernelCapability.model_validate({**given, "requires_contiguous": True, "max_ndim": 3, "min_ndim": 1})
    target = kernels.Target("lib", "relu", kernel, "float32", None)
    counts, found = Counter[str](), dict[str, tuple[int, str]]()
    kernels.try_kernel({"lib": _Kernel(spoil)}, target, 30, 1, counts, found)  # type: ignore[dict-item]
    assert counts["calls"] if not says else found
    assert all(says in text for _, text in found.values())
    assert bool(found) == bool(says)


@pytest.mark.parametrize(
    ("backend", "op"), [("torch", "attention"), ("torch", "attention_forward"), ("zentorch", "attention")]
)
def test_a_query_with_nan_gives_nan(harnesses: Harnesses, backend: str, op: str) -> None:
    """The libraries' kernels give 0, as for a row that sees nothing: a model that has gone wrong would look right.
    A row that does see nothing stays 0."""
    numbers = np.random.default_rng(1).standard_normal((1, 2, 3, 8)).astype("f4")
    odd = numbers.copy()
    odd[0, :, 0, 3] = np.nan
    mask = np.ones((1, 1, 3, 3), bool)
    mask[..., 1, :] = False
    q, rows = TensorSpec.contiguous("float32", odd.shape), TensorSpec.contiguous("float32", odd.shape[:3])
    specs = [q, q, q, TensorSpec.contiguous("bool", mask.shape), None, None]
    outs = [q, rows] if op == "attention_forward" else [q]
    attrs = {"is_causal": False, "scale": 1.0, "causal_alignment": "top_left", "layout": "BHSD"}
    data = [odd.tobytes(), numbers.tobytes(), numbers.tobytes(), mask.tobytes(), b"", b""]
    answer, written = harnesses[backend].run(f"{backend}.{op}", op, specs, outs, attrs, [data])
    assert "error" not in answer
    found = np.frombuffer(written[0], "f4").reshape(odd.shape)
    assert np.isnan(found[:, :, 0]).all()
    assert not found[:, :, 1].any()
    assert np.isfinite(found[:, :, 2]).all()
    if op == "attention_forward":
        lse = np.frombuffer(written[1], "f4").reshape(odd.shape[:3])
        assert np.isnan(lse[..., 0]).all()
        assert np.isneginf(lse[..., 1]).all()


@pytest.mark.parametrize(
    ("backend", "op"), [("torch", "attention"), ("torch", "attention_forward"), ("zentorch", "attention")]
)
def test_keys_with_nan_give_nan(harnesses: Harnesses, backend: str, op: str) -> None:
    """Where all that a query sees are such, too, and none of them its own: the kernels gave 0 as well."""
    numbers = np.random.default_rng(1).standard_normal((1, 2, 3, 8)).astype("f4")
    odd = numbers.copy()
    odd[0, 0, :, 3] = np.nan
    q, rows = TensorSpec.contiguous("float32", odd.shape), TensorSpec.contiguous("float32", odd.shape[:3])
    specs = [q, q, q, None, None, None]
    outs = [q, rows] if op == "attention_forward" else [q]
    attrs = {"is_causal": False, "scale": 1.0, "causal_alignment": "top_left", "layout": "BHSD"}
    data = [numbers.tobytes(), odd.tobytes(), numbers.tobytes(), b"", b"", b""]
    answer, written = harnesses[backend].run(f"{backend}.{op}", op, specs, outs, attrs, [data])
    assert "error" not in answer
    found = np.frombuffer(written[0], "f4").reshape(odd.shape)
    assert np.isnan(found[0, 0]).all()
    assert np.isfinite(found[0, 1]).all()


@pytest.mark.parametrize(
    ("backend", "op"), [("torch", "attention"), ("torch", "attention_forward"), ("zentorch", "attention")]
)
def test_scores_beyond_the_largest_number_give_no_zeros(harnesses: Harnesses, backend: str, op: str) -> None:
    """Of finite queries and keys, too: sums of both infinities. The kernels gave 0, as for a row that sees nothing."""
    odd, keys = np.random.default_rng(1).standard_normal((2, 1, 2, 7, 8)).astype("f4")
    numbers = keys.copy()
    odd[:, 0] *= np.float32(1e25)
    keys[:, 0] *= np.float32(1e25)
    q, rows = TensorSpec.contiguous("float32", odd.shape), TensorSpec.contiguous("float32", odd.shape[:3])
    outs = [q, rows] if op == "attention_forward" else [q]
    attrs = {"is_causal": False, "scale": 1.0, "causal_alignment": "top_left", "layout": "BHSD"}
    data = [odd.tobytes(), keys.tobytes(), numbers.tobytes(), b"", b"", b""]
    answer, written = harnesses[backend].run(f"{backend}.{op}", op, [q, q, q, None, None, None], outs, attrs, [data])
    assert "error" not in answer
    found = np.frombuffer(written[0], "f4").reshape(odd.shape)
    assert np.isnan(found[0, 0]).all()
    assert np.isfinite(found[0, 1]).all()
    assert found[0, 1].any()


@pytest.mark.parametrize("last", [np.nan, 3e38])
@pytest.mark.parametrize(
    ("backend", "op"), [("torch", "attention"), ("torch", "attention_forward"), ("zentorch", "attention")]
)
def test_keys_behind_the_causal_rule_make_no_nan(harnesses: Harnesses, backend: str, op: str, last: float) -> None:
    """Of a result of 0, or a log-sum-exp of 0, which is looked at again, only with the keys that its query sees."""
    q, k, v = np.ones((3, 1, 2, 3, 8), "f4")
    q *= 1e5  # by which the last key's scores are sums of both infinities
    q[:, :, 0] *= [[0.0], [1.0]]  # the log-sum-exp of its row is 0
    k[:, :, :2] = 0
    k[:, :, 2] = np.array([last, -last] * 4)
    v[:, :, 0] = 0
    one, rows = TensorSpec.contiguous("float32", q.shape), TensorSpec.contiguous("float32", q.shape[:3])
    outs = [one, rows] if op == "attention_forward" else [one]
    attrs = {"is_causal": True, "scale": 1.0, "causal_alignment": "top_left", "layout": "BHSD"}
    data = [q.tobytes(), k.tobytes(), v.tobytes(), b"", b"", b""]
    specs = [one, one, one, None, None, None]
    answer, written = harnesses[backend].run(f"{backend}.{op}", op, specs, outs, attrs, [data])
    assert "error" not in answer
    found = np.frombuffer(written[0], "f4").reshape(q.shape)
    assert not found[:, :, 0].any()
    np.testing.assert_allclose(found[:, :, 1], 0.5)
    assert np.isnan(found[:, :, 2]).all()
    if op == "attention_forward":
        lse = np.frombuffer(written[1], "f4").reshape(q.shape[:3])
        np.testing.assert_allclose(lse[:, :, :2], [[[0, np.log(2)]] * 2], atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "op"),
    [("torch", "attention"), ("mlx", "attention"), ("torch", "attention_forward"),
     ("onnxruntime", "attention_forward"), ("onnx-reference", "attention_forward")],
)  # fmt: skip
def test_a_sink_of_nan_gives_nan(harnesses: Harnesses, backend: str, op: str) -> None:
    """ONNX Runtime's Max left it out, and the weights were divided by nothing."""
    numbers = np.random.default_rng(1).standard_normal((1, 2, 3, 8)).astype("f4")
    q, rows = TensorSpec.contiguous("float32", numbers.shape), TensorSpec.contiguous("float32", numbers.shape[:3])
    specs = [q, q, q, None, TensorSpec.contiguous("float32", (2,)), None]
    outs = [q, rows] if op == "attention_forward" else [q]
    attrs = {"is_causal": False, "scale": 1.0, "causal_alignment": "top_left", "layout": "BHSD"}
    data = [*[numbers.tobytes()] * 3, b"", np.array([np.nan, 0], "f4").tobytes(), b""]
    answer, written = harnesses[backend].run(f"{backend}.{op}", op, specs, outs, attrs, [data])
    assert "error" not in answer
    found = np.frombuffer(written[0], "f4").reshape(numbers.shape)
    assert np.isnan(found[0, 0]).all()
    assert np.isfinite(found[0, 1]).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -1.5, 1e-60])
@pytest.mark.parametrize(
    ("backend", "op"),
    [*((backend, "attention") for backend in ("torch", "zentorch", "mlx")),
     *((backend, "attention_forward") for backend in ("torch", "onnxruntime", "onnx-reference"))],
)  # fmt: skip
def test_attention_takes_any_scale(harnesses: Harnesses, backend: str, op: str, scale: float, is_causal: bool) -> None:
    """torch's and ZenDNN's kernels hide keys by -inf and multiply by the scale after: NaN. ZenDNN takes 0 for none."""
    q, k, v = np.random.default_rng(1).standard_normal((3, 1, 2, 3, 8)).astype("f4")
    one, rows = TensorSpec.contiguous("float32", q.shape), TensorSpec.contiguous("float32", q.shape[:3])
    outs = [one, rows] if op == "attention_forward" else [one]
    attrs = {"is_causal": is_causal, "scale": scale, "causal_alignment": "top_left", "layout": "BHSD"}
    data = [q.tobytes(), k.tobytes(), v.tobytes(), b"", b"", b""]
    answer, written = harnesses[backend].run(
        f"{backend}.{op}", op, [one, one, one, None, None, None], outs, attrs, [data]
    )
    assert "error" not in answer
    found = np.frombuffer(written[0], "f4").reshape(q.shape)
    wanted = reference.attention(q, k, v, is_causal=is_causal, scale=scale, causal_alignment="top_left")
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -1.5, 1e-60])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("torch", "float32"), ("torch", "float64"), ("onnxruntime", "float32"), ("onnx-reference", "float32")],
)
def test_gradients_of_attention_take_any_scale(
    harnesses: Harnesses, backend: str, dtype: str, scale: float, is_causal: bool
) -> None:
    """As the pass forward does."""
    grad, q, k, v = np.random.default_rng(1).standard_normal((4, 1, 2, 3, 8)).astype(dtype)
    attrs = {"is_causal": is_causal, "scale": scale, "causal_alignment": "top_left", "layout": "BHSD"}
    made = [one.astype(dtype) for one in reference.attention_forward(q, k, v, **attrs)]
    given = [grad, q, k, v, made[0], made[1].astype("f4")]
    one, rows = TensorSpec.contiguous(dtype, q.shape), TensorSpec.contiguous("float32", q.shape[:3])
    specs, data = [*[one] * 5, rows, None], [*(array.tobytes() for array in given), b""]
    answer, written = harnesses[backend].run(
        f"{backend}.attention_backward", "attention_backward", specs, [one] * 3, attrs, [data]
    )
    assert "error" not in answer
    for found, wanted in zip(written, reference.attention_backward(*given, **attrs), strict=True):
        np.testing.assert_allclose(np.frombuffer(found, dtype).reshape(q.shape), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, -1.5, 1e-60])
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_attention_of_sequences_takes_any_scale(harnesses: Harnesses, backend: str, scale: float) -> None:
    q, k, v = np.random.default_rng(1).standard_normal((3, 7, 2, 8)).astype("f4")
    ends = np.array([0, 3, 7], "i4")
    attrs = {"is_causal": True, "scale": scale, "causal_alignment": "bottom_right"}
    one, where = TensorSpec.contiguous("float32", q.shape), TensorSpec.contiguous("int32", ends.shape)
    specs, data = [one, one, one, where, where], [array.tobytes() for array in (q, k, v, ends, ends)]
    answer, written = harnesses[backend].run(
        f"{backend}.attention_varlen", "attention_varlen", specs, [one], attrs, [data]
    )
    assert "error" not in answer
    wanted = reference.attention_varlen(q, k, v, ends, ends, **attrs)
    np.testing.assert_allclose(np.frombuffer(written[0], "f4").reshape(q.shape), wanted, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
def test_an_activation_of_nan_is_nan_where_it_is_fused(harnesses: Harnesses, activation: str) -> None:
    """ZenDNN's relu of a product is its maximum with 0, which has no NaN."""
    x, weight = np.ones((2, 16), "f4"), np.ones((8, 16), "f4")
    x[1, 3] = np.nan
    specs = [TensorSpec.contiguous("float32", x.shape), TensorSpec.contiguous("float32", weight.shape), None]
    out = TensorSpec.contiguous("float32", (2, 8))
    data = [x.tobytes(), weight.tobytes(), b""]
    answer, written = harnesses["zentorch"].run(
        "zentorch.linear", "linear", specs, [out], {"activation": activation}, [data]
    )
    assert "error" not in answer
    found = np.frombuffer(written[0], "f4").reshape(2, 8)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize("backend", ["onnxruntime", "torch", "mlx", "numba", "zentorch"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("some", [(np.inf, 3e38, 1.0, 0.0, -1.0, -3e38, np.nan), (3e38, -3e38, 1.0)])
def test_gelu_of_infinity_is_infinity(
    harnesses: Harnesses, backend: str, approximate: str, some: tuple[float, ...]
) -> None:
    """oneDNN's kernel, which torch has on CPUs with AVX-512, gives NaN, and infinity for half of the largest number.
    So does ZenDNN's, fused into a product. The sum of the second ones is finite."""
    numbers = np.array(some * 8, "f4")
    x = TensorSpec.contiguous("float32", numbers.shape)
    wanted = np.where(numbers > 1e38, numbers, reference.gelu(numbers, approximate=approximate))
    if backend == "zentorch":
        activation = "gelu" if approximate == "none" else "gelu_tanh"
        column, one = (TensorSpec.contiguous("float32", shape) for shape in ((len(numbers), 1), (1, 1)))
        data = [numbers.tobytes(), np.ones(1, "f4").tobytes(), b""]
        answer, written = harnesses[backend].run(
            "zentorch.linear", "linear", [column, one, None], [column], {"activation": activation}, [data]
        )
    else:
        answer, written = harnesses[backend].run(
            f"{backend}.gelu", "gelu", [x], [x], {"approximate": approximate}, [[numbers.tobytes()]]
        )
    assert "error" not in answer
    np.testing.assert_allclose(np.frombuffer(written[0], "f4"), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["mlx", "numba", "onnxruntime", "torch", "zentorch"])
@pytest.mark.parametrize("eps", [0.0, 1e-60])
def test_norms_without_an_epsilon(harnesses: Harnesses, backend: str, eps: float) -> None:
    """ZenDNN's did nothing, so that the result was what lay there before. A row of zeros is NaN."""
    x, residual = np.random.default_rng(1).standard_normal((2, 3, 8)).astype("f4")
    weight = np.arange(8, dtype="f4")
    x[1] = residual[1] = 0
    one, of_weight = TensorSpec.contiguous("float32", x.shape), TensorSpec.contiguous("float32", weight.shape)
    attrs, data = {"ndim": 1, "eps": eps}, [x.tobytes(), residual.tobytes(), weight.tobytes()]
    with np.errstate(invalid="ignore"):
        if backend != "onnxruntime":
            answer, written = harnesses[backend].run(
                f"{backend}.rms_norm", "rms_norm", [one, of_weight], [one], attrs, [[data[0], data[2]]]
            )
            assert "error" not in answer, answer
            wanted = reference.rms_norm(x, weight, ndim=1, eps=0.0)
            np.testing.assert_allclose(np.frombuffer(written[0], "f4").reshape(x.shape), wanted, rtol=1e-5)
        answer, written = harnesses[backend].run(
            f"{backend}.add_rms_norm", "add_rms_norm", [one, one, of_weight], [one, one], attrs, [data]
        )
        assert "error" not in answer
        both = reference.add_rms_norm(x, residual, weight, ndim=1, eps=0.0)
        for result, expected in zip(written, both, strict=True):
            np.testing.assert_allclose(np.frombuffer(result, "f4").reshape(x.shape), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("backend", "activation"), [("torch", "gelu"), ("torch", "gelu_tanh"), ("zentorch", "gelu")])
def test_gelu_of_the_largest_numbers_in_a_gated_mlp(harnesses: Harnesses, backend: str, activation: str) -> None:
    """The gates are 3e38, -3e38 and 1, of which no sum is infinite; what they are multiplied by, 1e-38 each."""
    numbers, matrix = np.eye(3, dtype="f4"), np.eye(3, dtype="f4")
    gate_up = np.concatenate([np.diag([3e38, -3e38, 1.0]), np.full((3, 3), 1e-38)]).astype("f4")
    specs = [TensorSpec.contiguous("float32", array.shape) for array in (numbers, gate_up, matrix)]
    answer, written = harnesses[backend].run(
        f"{backend}.gated_mlp",
        *("gated_mlp", specs, specs[:1], {"activation": activation}),
        [[array.tobytes() for array in (numbers, gate_up, matrix)]],
    )
    assert "error" not in answer
    wanted = np.diag([3.0, 0.0, 8.413e-39])
    np.testing.assert_allclose(np.frombuffer(written[0], "f4").reshape(3, 3), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelu_of_infinity_is_infinity_behind_a_product(harnesses: Harnesses, activation: str) -> None:
    x, out = TensorSpec.contiguous("float32", (8, 4)), TensorSpec.contiguous("float32", (8, 8))
    numbers = np.array([[np.inf, 1, 1, 1], [1, 1, 1, 1]] * 4, "f4")
    data = [numbers.tobytes(), np.ones((8, 4), "f4").tobytes(), b""]
    answer, written = harnesses["torch"].run(
        "torch.linear", "linear", [x, x, None], [out], {"activation": activation}, [data]
    )
    assert "error" not in answer
    found = np.frombuffer(written[0], "f4").reshape(8, 8)
    assert np.isposinf(found[::2]).all()
    np.testing.assert_allclose(found[1::2], 3.99987, atol=1e-4)


@pytest.mark.parametrize("backend", ["onnxruntime", "torch", "mlx"])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_the_largest_of_a_window_with_nan_is_nan(harnesses: Harnesses, backend: str, place: int) -> None:
    """ONNX Runtime's ReduceMax leaves NaN out, as its MaxPool does."""
    numbers = np.arange(8, dtype="f4").reshape(1, 1, 8)
    numbers[..., place] = np.nan
    x, out = TensorSpec.contiguous("float32", (1, 1, 8)), TensorSpec.contiguous("float32", (1, 1, 2))
    answer, written = harnesses[backend].run(
        f"{backend}.adaptive_max_pool", "adaptive_max_pool", [x], [out], {"output_size": "2"}, [[numbers.tobytes()]]
    )
    assert "error" not in answer
    one, other = np.frombuffer(written[0], "f4")
    assert np.isnan(one)
    assert other == 7.0
