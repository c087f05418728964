"""Calls through the public API to toy backends: what goes in, what comes out, what the report says."""

from __future__ import annotations

import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import INVALID, RAISE, fault
from tests.process.harness import Site

import layerzero as lz
from layerzero.ipc.vocabulary.tensors import TensorSpec

pytestmark = pytest.mark.usefixtures("connected")
NOT_RUN = ("torch-hpu", "torch-rocm", "torch-xpu")  # for devices that no machine of the tests has
TOLERANCE = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-14}


def silu(x: Any) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        return wide / (1 + np.exp(-wide))


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape).astype(dtype)


def read_only() -> np.ndarray:
    x = numbers(3, 4)
    x.flags.writeable = False
    return x


def misaligned() -> np.ndarray:
    return np.frombuffer(bytearray(b"\0" + numbers(4).tobytes()), np.float32, count=4, offset=1)


LAYOUTS: dict[str, Callable[[], np.ndarray]] = {
    "contiguous": lambda: numbers(3, 4),
    "transposed": lambda: numbers(3, 4, 5).transpose(2, 0, 1),
    "fortran": lambda: np.asfortranarray(numbers(3, 4)),
    "sliced": lambda: numbers(8, 9)[1::2, ::3],
    "negative strides": lambda: numbers(5, 6)[::-1, ::-2],
    "broadcast": lambda: np.broadcast_to(numbers(1, 4), (3, 4)),
    "zero dimensions": lambda: np.array(1.5, np.float32),
    "scalar": lambda: np.float32(1.5),
    "sixteen dimensions": lambda: numbers(*[1, 2] * 8),
    "empty": lambda: numbers(0, 3),
    "empty at the end": lambda: numbers(3, 0),
    "read-only": read_only,
    "misaligned": misaligned,
    "subclass": lambda: numbers(3, 4).view(np.recarray),
    "large": lambda: numbers(1 << 20),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_numpy_layout_gives_a_new_array_of_its_shape(layout: str) -> None:
    """Callers slice and transpose; none of it may change numbers, shape or the caller's own array."""
    x = LAYOUTS[layout]()
    before = np.array(x)
    result = lz.silu(x)
    assert (type(result), result.dtype, result.shape) == (np.ndarray, np.dtype("float32"), np.shape(x))
    np.testing.assert_allclose(result, silu(before), rtol=1e-6)
    np.testing.assert_array_equal(x, before)
    assert result.flags.writeable
    assert not np.shares_memory(result, x)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "broadcast"])
def test_strided_views_of_shared_memory_cross_without_a_copy(layout: str) -> None:
    """A view of a KV cache is not contiguous; copying it would cost what sharing saved."""
    base = lz.share(numbers(6, 8))
    x = {"transposed": base.T, "sliced": base[1::2, ::3], "broadcast": np.broadcast_to(base[0], (5, 8))}[layout]
    np.testing.assert_allclose(lz.silu(x), silu(x), rtol=1e-6)
    report = lz.last_report()
    assert report is not None
    assert report.copies == ()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_numpy_dtypes_survive(dtype: str) -> None:
    """A result in another precision than the input's is a wrong result."""
    x = numbers(50, dtype=dtype)
    result = lz.silu(x)
    assert result.dtype == dtype
    np.testing.assert_allclose(result, silu(x), rtol=TOLERANCE[dtype])


def test_several_inputs_each_in_its_own_place() -> None:
    """Arguments must not be mixed up, whether they are shared, copied or broadcast."""
    a, b = lz.share(numbers(2, 3, 4)), numbers(5, 4).T
    np.testing.assert_allclose(lz.matmul(a, b), a @ b, rtol=1e-5)
    report = lz.last_report()
    assert report is not None
    assert [copy.arg for copy in report.copies] == ["b"]


@pytest.mark.parametrize("make", [lambda x: array.array("d", x), lambda x: memoryview(array.array("d", x))])
def test_buffers_give_a_memoryview_of_their_format(make: Callable[[list[float]], Any]) -> None:
    """Callers without NumPy get something that they can read without NumPy."""
    values = [0.5, -1.0, 3.0]
    result = lz.silu(make(values))
    assert (type(result), result.format, result.shape) == (memoryview, "d", (3,))
    np.testing.assert_allclose(result.tolist(), silu(values), rtol=1e-14)


def test_bytearray_seen_as_floats_is_accepted_and_as_bytes_refused() -> None:
    """A bytearray has no dtype but uint8, and an activation of uint8 makes no sense."""
    data = bytearray(numbers(4).tobytes())
    result = lz.silu(memoryview(data).cast("f"))
    np.testing.assert_allclose(np.asarray(result), silu(np.frombuffer(data, np.float32)), rtol=1e-6)
    with pytest.raises(lz.InvalidArgument, match="uint8"):
        lz.silu(data)


# --- reports


def test_report_names_kernel_cost_copies_and_the_other_candidates(connected: Site) -> None:
    """What ran, where, at which cost and why not elsewhere is the answer to every performance question."""
    alpha, _ = connected.wait_ready("alpha", "beta")
    x = numbers(5)
    lz.silu(x)
    report = lz.last_report()
    assert report is not None
    assert (report.op, report.kernel_id, report.backend, report.worker_pid) == ("silu", "alpha.silu", "alpha", alpha)
    assert [(copy.arg, copy.nbytes, copy.where) for copy in report.copies] == [("x", 20, "client")]
    assert "arena" in report.copies[0].reason
    assert report.copied_bytes == 20
    assert report.elapsed_us is not None
    assert report.kernel_us is not None
    assert 0 < report.kernel_us < report.elapsed_us
    assert [(a.backend, a.outcome, a.worker_pid) for a in report.attempts] == [("alpha", None, alpha)]
    verdicts = {c.kernel_id: c.accepted for c in report.candidates}
    toys = {"alpha.silu": True, "beta.silu": True, "gamma.silu": True}
    others = ("mlx", "numba", "onnxruntime", "torch", "torch-cuda", "cupy", *NOT_RUN)
    assert verdicts == {**toys, **{f"{backend}.silu": False for backend in others}}
    torch_reason = next(c for c in report.candidates if c.backend == "torch").reasons[0]
    assert torch_reason.code == "NOT_INSTALLED"
    assert torch_reason.repair == "lz env build torch"


def test_report_prints_as_text_and_as_html() -> None:
    """It is read in terminals and in notebooks; names from descriptors must not become markup."""
    lz.silu(numbers(5))
    report = lz.last_report()
    assert report is not None
    text, page = str(report), report._repr_html_()
    assert text.splitlines()[0].startswith("silu: alpha.silu (alpha, pid ")
    for fact in ("copied x: 20 bytes", "beta.silu", "NOT_INSTALLED"):
        assert fact in text
        assert fact in page
    assert page.count("<table>") == page.count("</table>") == 1
    assert report.to_dict()["kernel_id"] == "alpha.silu"


def test_report_belongs_to_the_thread_and_keeps_no_memory() -> None:
    """A report that kept the last call's tensors alive would hold gigabytes in idle threads."""
    from layerzero.client.connection.arena import pool

    before = pool.stats()["slots"]
    result = lz.silu(numbers(5))
    del result
    assert pool.stats()["slots"] == before
    report = lz.last_report()
    assert report is not None
    assert report.copied_bytes == 20


def test_explain_runs_nothing_and_copies_nothing(connected: Site) -> None:
    """Asking why must not start workers, run kernels or need the data."""
    spec = TensorSpec.contiguous("float32", (1 << 20, 1 << 10))
    calls = [(b["name"], b["answered"], b["failed"], b["state"]) for b in lz.status()["backends"]]
    report = lz.explain("silu", spec)
    assert (report.kernel_id, report.worker_pid, report.elapsed_us) == ("alpha.silu", None, None)
    assert [(b["name"], b["answered"], b["failed"], b["state"]) for b in lz.status()["backends"]] == calls
    assert lz.explain(lz.silu, np.ones(3, np.float32), backend="beta").kernel_id == "beta.silu"


def test_pinned_backend_serves_and_the_others_say_why_not() -> None:
    """backend= is how results are compared between libraries."""
    lz.silu(numbers(5), backend="gamma")
    report = lz.last_report()
    assert report is not None
    assert report.backend == "gamma"
    reasons = {c.backend: c.reasons[0].code for c in report.candidates if c.reasons}
    pinned = dict.fromkeys(("alpha", "beta", "mlx", "numba", "onnxruntime", "torch", *NOT_RUN), "NOT_PINNED")
    assert reasons == {**pinned, "torch-cuda": "PLATFORM_MISMATCH", "cupy": "PLATFORM_MISMATCH"}


# --- errors


def test_call_that_no_kernel_takes_lists_every_reason() -> None:
    """`no kernel` without the reasons sends the user to the source code."""
    with pytest.raises(lz.NoBackend) as failure:
        lz.silu(numbers(3), backend="torch")
    assert "torch.silu: NOT_INSTALLED" in str(failure.value)
    assert "lz env build torch" in str(failure.value)
    candidates = {c.backend for c in failure.value.report.candidates}
    assert candidates == {
        "alpha",
        "beta",
        "gamma",
        "mlx",
        "numba",
        "onnxruntime",
        "torch",
        "torch-cuda",
        "cupy",
        *NOT_RUN,
    }


def test_the_report_before_the_first_call_is_an_error_that_says_so() -> None:
    """Nobody writes a test for None after each call; and a thread's first call is not that of another."""
    lz.silu(numbers(3))
    with ThreadPoolExecutor() as threads, pytest.raises(lz.InvalidArgument, match="make a call first: this thread has"):
        threads.submit(lz.last_report).result()


def test_wrong_arguments_are_refused_by_name() -> None:
    """An argument error names the value and what is allowed, and costs no worker."""
    with pytest.raises(lz.InvalidArgument, match="int64"):
        lz.silu(np.arange(3))
    with pytest.raises(lz.InvalidArgument, match="shape"):
        lz.matmul(numbers(2, 3), numbers(2, 3))
    with pytest.raises(
        lz.InvalidArgument, match=r"silu: input: builtins.object is no array.*; pass numpy.asarray\(...\)"
    ):
        lz.silu(object())
    with pytest.raises(lz.InvalidArgument, match="silu: input: None is no array; allowed: a NumPy array"):
        lz.silu(None)
    with pytest.raises(lz.InvalidArgument, match="linear: weight: None is no array"):
        lz.explain("linear", numbers(2, 3), None)
    with pytest.raises(lz.InvalidArgument, match=r"linear: bias: builtins.float is no array"):
        lz.linear(numbers(2, 3), numbers(4, 3), 1.0)
    with pytest.raises(lz.InvalidArgument, match=r"quantize: scale: builtins.float is no array"):
        lz.dry_run(lambda: lz.quantize(numbers(4), 1.0))
    with pytest.raises(lz.InvalidArgument, match=r"matmul: out=: builtins.list is no array"):
        lz.matmul(numbers(2, 2), numbers(2, 2), out=[])
    frame = type("DataFrame", (), {"to_numpy": lambda self: numbers(3)})()
    with pytest.raises(lz.InvalidArgument, match=r"DataFrame is no array.*; pass its .to_numpy\(\)"):
        lz.silu(frame)
    with pytest.raises(lz.InvalidArgument, match="no backend is called 'aplha'"):
        lz.silu(numbers(3), backend="aplha")
    for timeout_s in (0, -1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(lz.InvalidArgument, match="timeout_s"):
            lz.silu(numbers(3), timeout_s=timeout_s)  # type: ignore[arg-type]


def test_invalid_input_found_by_the_kernel_is_the_callers_and_not_retried(connected: Site) -> None:
    """Another backend would refuse it too; the worker is healthy and stays."""
    alpha, _ = connected.wait_ready("alpha", "beta")
    x = np.array([fault(INVALID), 1], np.float32)
    with pytest.raises(lz.InvalidArgument, match="calls this input invalid"):
        lz.silu(x)
    assert connected.backend("alpha")["pid"] == alpha


def test_exception_in_a_pinned_kernel_reaches_the_caller_with_its_traceback(connected: Site) -> None:
    """Whoever pins a backend debugs it; the worker's own words help."""
    connected.wait_ready("gamma")
    with pytest.raises(lz.BackendError, match="RuntimeError: the toy raises on request") as failure:
        lz.silu(np.array([fault(RAISE)]), backend="gamma")
    assert failure.value.facts["exception"] == "RuntimeError"
    assert "toy.py" in failure.value.facts["traceback"]
    assert [(a.backend, a.outcome) for a in failure.value.report.attempts] == [("gamma", "BACKEND_ERROR")]
    assert lz.last_report() is failure.value.report


@pytest.mark.parametrize("backend", [["alpha"], {"alpha"}, b"alpha", 7, "", "Alpha", "a" * 65])
def test_backend_of_a_wrong_type_or_form_is_refused_by_value(backend: Any) -> None:
    """A list of two backends looks sensible, and is not what pinning means."""
    with pytest.raises(lz.InvalidArgument, match=r"backend is .*lz\.status"):
        lz.silu(numbers(3), backend=backend)


def test_numpy_scalars_are_as_good_as_pythons() -> None:
    """They come out of every computation with shapes."""
    x = numbers(2, 8)
    assert lz.explain("layer_norm", x, np.int64(8), eps=np.float32(1e-5)).op == "layer_norm"
    assert lz.explain("rms_norm", x, np.array([2, 8])).op == "rms_norm"
    assert lz.explain("softmax", x, np.int8(-1)).op == "softmax"
    q = numbers(1, 2, 3, 4)
    plain = lz.explain("attention", q, q, q, is_causal=True, scale=0.5)
    assert lz.explain("attention", q, q, q, is_causal=np.True_, scale=np.float16(0.5)) == plain
    np.testing.assert_allclose(lz.silu(x, timeout_s=np.float32(5)), silu(x), rtol=1e-6)


def test_arguments_of_a_wrong_type_are_refused_by_name() -> None:
    """Whether they can be hashed or not."""
    x, q = numbers(2, 8), numbers(1, 2, 3, 4)
    for wrong, name in (
        (lambda: lz.gelu(x, approximate=[]), "approximate"),  # type: ignore[arg-type]
        (lambda: lz.gelu(x, approximate=np.array(["none", "tanh"])), "approximate"),  # type: ignore[arg-type]
        (lambda: lz.layer_norm(x, 8.5), "normalized_shape"),  # type: ignore[arg-type]
        (lambda: lz.layer_norm(x, np.array(8.0)), "normalized_shape"),  # type: ignore[arg-type]
        (lambda: lz.rms_norm(x, [[8]]), "normalized_shape"),  # type: ignore[list-item]
        (lambda: lz.rms_norm(x, "8"), "normalized_shape"),  # type: ignore[arg-type]
        (lambda: lz.attention(q, q, q, is_causal=[True]), "is_causal"),  # type: ignore[arg-type]
        (lambda: lz.attention(q, q, q, is_causal=np.int64(1)), "is_causal"),  # type: ignore[arg-type]
        (lambda: lz.softmax(x, {}), "dim"),  # type: ignore[arg-type]
        (lambda: lz.silu(x, timeout_s=True), "timeout_s"),
        (lambda: lz.silu(x, timeout_s="5"), "timeout_s"),  # type: ignore[arg-type]
    ):
        with pytest.raises(lz.InvalidArgument, match=f"{name} is"):
            wrong()


def test_a_weight_in_the_place_of_a_shape_is_refused_without_its_numbers() -> None:
    x, weight = np.ones((2, 512), np.float32), np.ones(512, np.float32)
    for op in (lz.rms_norm, lz.layer_norm):
        with pytest.raises(lz.InvalidArgument, match=r"normalized_shape is an array of float32; .* weight=") as caught:
            op(x, weight)
        assert len(str(caught.value)) < 200


def test_copies_of_one_kind_are_reported_in_one_line() -> None:
    """Three lines that say the same are two too many."""
    lz.matmul(numbers(4, 4), numbers(4, 4))
    report = lz.last_report()
    assert report is not None
    assert str(report).count("copied ") == 1
    assert "copied a, b: 128 bytes in the client, it does not lie in an arena" in str(report)
