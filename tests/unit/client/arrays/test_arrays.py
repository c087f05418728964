"""client/array_*.py: what is accepted, that bytes survive, and who keeps arena memory alive."""

from __future__ import annotations

import array
import ctypes
import gc
import subprocess
import sys
import weakref
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.client.arrays.copies import copy_into
from layerzero.client.arrays.recognition import describe, intern_spec
from layerzero.client.arrays.wrapping import wrap
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import ITEMSIZE, NARROW_DTYPES, TensorSpec

NUMPY_DTYPES = [name for name in ITEMSIZE if name not in ("bfloat16", *NARROW_DTYPES)]


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    return pytest.importorskip("torch")


class Foreign:
    """An array of a library of its own: DLPack, the array API's namespace, and nothing else."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def __dlpack__(self, **kwargs: Any) -> object:
        return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()

    def __array_namespace__(self) -> ModuleType:
        return np


def copied(obj: Any) -> bytes:
    described = describe(obj)
    dst = bytearray(described.nbytes)
    copy_into(described, memoryview(dst))
    return bytes(dst)


def elements_at(address: int, spec: TensorSpec) -> np.ndarray:
    """The elements a worker would see, as unsigned integers."""
    memory = (ctypes.c_char * max(spec.span_bytes, 1)).from_address(address)
    strides = tuple(s * spec.itemsize for s in spec.strides)
    return np.ndarray(spec.shape, f"u{spec.itemsize}", memory, strides=strides) if spec.numel else np.empty(spec.shape)


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """Any view NumPy can make: slices with steps of both signs, transposes, inserted and broadcast dimensions."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(NUMPY_DTYPES))
    base = np.arange(int(np.prod(shape)), dtype="u4").reshape(shape).astype(dtype)
    for axis, extent in enumerate(base.shape):
        part = draw(st.slices(extent)) if extent else slice(None)
        base = base[(slice(None),) * axis + (part,)]
    base = base.transpose(draw(st.permutations(range(base.ndim))))
    if draw(st.booleans()):
        shape = (draw(st.integers(1, 3)), *base.shape)
        base = np.lib.stride_tricks.as_strided(base, shape, (0, *base.strides))  # broadcast_to would make it read-only
    return base


@given(views())
def test_numpy_views_are_described_and_copied_element_by_element(view: np.ndarray) -> None:
    """A worker sees only address and spec: they must name the caller's elements, in order."""
    described = describe(view)
    assert (described.spec.dtype, described.spec.shape) == (view.dtype.name, view.shape)
    assert copied(view) == view.tobytes()
    if described.needs_copy:
        assert described.spec.is_contiguous
    else:
        assert elements_at(described.address, described.spec).tobytes() == view.tobytes()


@given(views())
def test_dlpack_views_are_described_and_copied_element_by_element(view: np.ndarray) -> None:
    """Libraries known only by DLPack get the same treatment."""
    described = describe(Foreign(view))
    assert (described.kind, described.spec.shape) == ("dlpack", view.shape)
    assert copied(Foreign(view)) == view.tobytes()
    if not described.needs_copy:
        assert elements_at(described.address, described.spec).tobytes() == view.tobytes()


@given(views())
def test_buffers_are_described_and_copied_element_by_element(view: np.ndarray) -> None:
    """A memoryview may be as strided as any array."""
    described = describe(memoryview(view))
    assert (described.kind, described.spec.dtype, described.spec.shape) == ("buffer", view.dtype.name, view.shape)
    assert copied(memoryview(view)) == view.tobytes()
    if not described.needs_copy:
        assert elements_at(described.address, described.spec).tobytes() == view.tobytes()


@settings(deadline=None)  # the first example may import torch
@given(views().filter(lambda view: all(s >= 0 for s in view.strides)))
def test_torch_views_are_described_and_copied_element_by_element(view: np.ndarray) -> None:
    """torch reports strides in elements, NumPy in bytes."""
    tensor = pytest.importorskip("torch").from_numpy(view)
    described = describe(tensor)
    assert described.spec == TensorSpec(view.dtype.name, view.shape, tensor.stride())
    assert copied(tensor) == view.tobytes()
    assert elements_at(described.address, described.spec).tobytes() == view.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_bit_pattern_survives(torch: ModuleType, dtype: str) -> None:
    """NaN payloads and signed zeros are data; a copy through another dtype would lose them."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    tensor = torch.from_numpy(bits).view(getattr(torch, dtype))
    assert describe(tensor).spec == TensorSpec.contiguous(dtype, (1 << 16,))
    assert copied(tensor) == bits.tobytes()
    assert copied(tensor.reshape(256, 256).T) == bits.reshape(256, 256).T.tobytes()


def test_large_arrays_are_copied_whole(torch: ModuleType) -> None:
    """Above a size the copy takes another path."""
    data = np.arange(1 << 19, dtype=np.int32).reshape(1 << 10, -1)
    for view in (data, data.T):
        assert copied(view) == copied(torch.from_numpy(view)) == copied(Foreign(view)) == view.tobytes()
        assert copied(memoryview(view)) == view.tobytes()


def test_copy_into_memory_that_is_too_small_raises() -> None:
    """A raw copy past the end would corrupt the neighbouring slot."""
    with pytest.raises(ValueError, match="16 bytes do not fit into 8"):
        copy_into(describe(np.zeros(4, np.float32)), memoryview(bytearray(8)))


@pytest.mark.parametrize("make", [lambda: np.zeros((2, 3)), lambda: pytest.importorskip("torch").zeros(2, 3)])
def test_equal_specs_are_one_object(make: Any) -> None:
    """Caches behind this module look specs up on every call."""
    assert describe(make()).spec is describe(make()).spec
    assert intern_spec("float32", (2,), (1,)) is intern_spec("float32", (2,), (1,))


def test_scalars_and_zero_dim_arrays_have_shape_of_no_dimensions(torch: ModuleType) -> None:
    """NumPy hands out scalars where torch keeps 0-d tensors."""
    for obj in (np.float32(1.5), np.array(1.5, np.float32), torch.tensor(1.5)):
        assert describe(obj).spec == TensorSpec("float32", (), ())
        assert copied(obj) == np.float32(1.5).tobytes()


def test_numpy_layouts_that_elements_cannot_express_need_a_copy() -> None:
    """Strides are non-negative element counts on the wire; anything else must be copied before it crosses."""
    packed = np.zeros(3, np.dtype([("a", "i1"), ("b", "<i4")]))
    packed["b"] = [1, 2, 3]
    backwards = np.arange(3, dtype=np.int32)[::-1]
    misaligned = np.frombuffer(b"\0" + packed["b"].tobytes(), np.int32, offset=1)
    for view in (packed["b"], backwards, misaligned):
        described = describe(view)
        assert described.needs_copy
        assert described.spec == TensorSpec.contiguous("int32", (3,))
        assert copied(view) == view.tobytes()


def test_the_stride_of_an_extent_of_one_never_forces_a_copy() -> None:
    """Reversing one element changes nothing."""
    described = describe(np.zeros((1, 3), np.float32)[::-1])
    assert (described.needs_copy, described.spec) == (False, TensorSpec.contiguous("float32", (1, 3)))


def test_writable_and_requires_grad_are_reported(torch: ModuleType) -> None:
    """out= needs the first, the refusal of training calls the second."""
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    for obj in (np.zeros(2), np.zeros((2, 2)).T, np.zeros(2)[::-1], bytearray(2), Foreign(np.zeros(2)), torch.zeros(2)):
        assert describe(obj).writable
    for obj in (frozen, frozen[::-1], b"ab", memoryview(frozen), Foreign(frozen)):
        assert not describe(obj).writable
    parameter = torch.nn.Parameter(torch.ones(2))
    assert describe(parameter).requires_grad
    assert copied(parameter) == torch.ones(2).numpy().tobytes()
    assert not describe(parameter.detach()).requires_grad


def test_torch_tensors_with_the_negative_bit_are_resolved(torch: ModuleType) -> None:
    """The bytes of such a tensor have the wrong sign."""
    lazy = torch.tensor([1 + 2j]).conj().imag
    assert lazy.is_neg()
    assert copied(lazy) == np.float32(-2).tobytes()


def test_plain_torch_subclasses_are_accepted(torch: ModuleType) -> None:
    """Image and mask classes are tensors with a label."""
    boxes = torch.ones(2).as_subclass(type("Boxes", (torch.Tensor,), {}))
    assert describe(boxes).obj is boxes
    assert copied(boxes) == torch.ones(2).numpy().tobytes()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: [1.0, 2.0], "builtins.list is no array"),
        (lambda: "text", "builtins.str is no array"),
        (lambda: np.zeros(2, ">f4"), "dtype >f4 of the other byte order; allowed: native"),
        (lambda: np.zeros(2, complex), "dtype complex128; allowed: bool, uint8"),
        (lambda: np.zeros(2, object), "dtype object"),
        (lambda: np.array(["a"]), "dtype <U1"),
        (lambda: np.zeros(2, "datetime64[s]"), r"dtype datetime64\[s\]"),
        (lambda: np.zeros(2, [("a", "f4")]), "NumPy array has dtype"),
        (lambda: np.zeros(2, np.longdouble), "dtype float128|dtype longdouble"),
        (lambda: np.ma.masked_array([1.0], [True]), r"mask would be ignored.*\.filled"),
        (lambda: np.zeros((1,) * 17), "17 dimensions; allowed: at most 16"),
        (lambda: memoryview(np.zeros(2, complex)), "buffer has format 'Zd'"),
        (lambda: memoryview(np.zeros(2, ">f4")), "buffer has format '>f'"),
        (lambda: array.array("u", "ab"), "buffer has format 'w'|buffer has format 'u'"),
    ],
)
def test_objects_that_are_not_plain_numbers_are_refused(make: Any, says: str) -> None:
    """The error says what was given and what to do."""
    with pytest.raises(InvalidArgument, match=says):
        describe(make())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda t: t.zeros(2, device="meta"), r"device meta, whose memory is not shared .*; call \.cpu"),
        (lambda t: t.eye(2).to_sparse(), "layout sparse_coo; allowed: strided"),
        (lambda t: t.zeros(2, dtype=t.complex64), "dtype complex64; allowed"),
        (lambda t: t.ones(2, dtype=t.complex64).conj(), "dtype complex64"),
        (lambda t: t.zeros(2, dtype=t.float8_e5m2fnuz), "dtype float8_e5m2fnuz"),
        (lambda t: t._efficientzerotensor(2), "no memory of its own"),
        (lambda t: t.zeros((1,) * 17), "17 dimensions"),
    ],
)
def test_torch_tensors_without_plain_cpu_memory_are_refused(torch: ModuleType, make: Any, says: str) -> None:
    """Reading them would give garbage or crash."""
    with pytest.raises(InvalidArgument, match=says):
        describe(make(torch))


def test_torch_wrappers_are_refused_inside_their_transformation(torch: ModuleType) -> None:
    """vmap's tensors look plain and have no storage; fake tensors have no data at all."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with pytest.raises(InvalidArgument, match="no memory of its own"):
        torch.vmap(lambda x: describe(x) and x)(torch.ones(2, 3))
    with pytest.raises(InvalidArgument, match="no memory of its own"):
        torch.func.grad(lambda x: describe(x) and x.sum())(torch.ones(2))
    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(InvalidArgument, match="FakeTensor wraps other tensors"):
        describe(fake)


def test_dlpack_objects_without_a_namespace_are_refused_before_the_call() -> None:
    """Nothing could make the result; better to hear it before a kernel ran."""
    bare = type("Bare", (), {"__dlpack__": lambda self: None, "__dlpack_device__": lambda self: (1, 0)})
    with pytest.raises(InvalidArgument, match="no __array_namespace__"):
        describe(bare())


def test_nothing_is_imported_that_the_caller_did_not_import() -> None:
    """Importing torch costs seconds, and the caller's program may not have it."""
    script = (
        "import sys\n"
        "from layerzero.client.arrays.recognition import describe\n"
        "from layerzero.client.arrays.wrapping import wrap\n"
        "a = describe(bytearray(8)); m = memoryview(bytearray(8)); r, _ = wrap(m, a.spec, a)\n"
        "print(a.spec, r.format, [n for n in ('numpy', 'torch', 'jax', 'mlx') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "uint8[8] B []\n"


# --- wrap


class Arena:
    """Counts the slots that come back, as an arena does."""

    def __init__(self) -> None:
        self.freed = 0
        self._refs: list[weakref.ref[memoryview]] = []

    def slot(self, nbytes: int) -> memoryview:
        memory = memoryview(bytearray(256))[64 : 64 + nbytes]
        self._refs.append(weakref.ref(memory, self._free))
        return memory

    def _free(self, _ref: object) -> None:
        self.freed += 1


def slices_of(kind: str, result: Any) -> Any:
    return result.cast("B")[4:] if kind == "buffer" else result[1:, ::2]


@pytest.mark.parametrize("kind", ["numpy", "torch", "buffer", "dlpack"])
def test_memory_is_free_when_the_last_view_dies(kind: str) -> None:
    """The arena gives the slot to the next call at that moment: too early corrupts, never leaks."""
    like = {
        "numpy": lambda: np.zeros(1),
        "torch": lambda: pytest.importorskip("torch").zeros(1),
        "buffer": lambda: bytearray(1),
        "dlpack": lambda: Foreign(np.zeros(1)),
    }[kind]()
    arena = Arena()
    memory = arena.slot(24)
    result, was_copied = wrap(memory, TensorSpec.contiguous("float32", (2, 3)), describe(like))
    memory[:4] = np.float32(7).tobytes()
    del memory
    first = result[0, 0]
    assert (float(first), was_copied) == (7.0, False)
    view = slices_of(kind, result)
    del result, first
    gc.collect()
    assert arena.freed == 0
    del view
    gc.collect()
    assert arena.freed == 1


def test_views_made_by_other_libraries_keep_the_memory_too(torch: ModuleType) -> None:
    """Results travel: NumPy to torch, torch to NumPy, both to memoryviews."""
    spec = TensorSpec.contiguous("float32", (2, 3))
    for like, export in (
        (np.zeros(1), torch.from_numpy),
        (np.zeros(1), memoryview),
        (np.zeros(1), lambda a: torch.from_dlpack(a).view(-1)[1:]),
        (torch.zeros(1), lambda t: t.numpy()),
        (torch.zeros(1), np.from_dlpack),
        (torch.zeros(1), lambda t: t.T.detach()),
        (torch.zeros(1), lambda t: t.untyped_storage()),
        (bytearray(1), np.asarray),
        (bytearray(1), lambda m: m.toreadonly()),
    ):
        arena = Arena()
        exported = export(wrap(arena.slot(24), spec, describe(like))[0])
        gc.collect()
        assert arena.freed == 0
        del exported
        gc.collect()
        assert arena.freed == 1


@pytest.mark.parametrize("dtype", list(ITEMSIZE))
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
@pytest.mark.parametrize("kind", ["numpy", "torch", "buffer", "dlpack"])
def test_wrapped_memory_reads_back_with_the_same_spec(kind: str, shape: tuple[int, ...], dtype: str) -> None:
    """wrap is the inverse of describe and copy_into, for every dtype, scalars and empty arrays."""
    if dtype not in NUMPY_DTYPES and kind == "buffer":
        pytest.skip(f"the buffer protocol has no format for {dtype}")
    if dtype == "float4_e2m1fn_x2" and kind != "torch":
        pytest.skip("only torch has packed fp4")
    if dtype not in NUMPY_DTYPES and kind != "torch":
        pytest.importorskip("ml_dtypes")
    like = {"numpy": np.zeros(1), "buffer": b"", "dlpack": Foreign(np.zeros(1))}.get(kind)
    spec = TensorSpec.contiguous(dtype, shape)
    data = bytes(n % 2 for n in range(spec.span_bytes))
    memory = memoryview(bytearray(data))
    result, was_copied = wrap(memory, spec, describe(pytest.importorskip("torch").zeros(1) if like is None else like))
    described = describe(result)
    assert (described.kind, described.spec.dtype, described.spec.shape) == (
        "numpy" if kind == "dlpack" else kind, dtype, shape,
    )  # fmt: skip
    assert (copied(result), was_copied) == (data, False)
    if data:
        memory[0] ^= 1
        assert copied(result)[0] == data[0] ^ 1


@pytest.mark.parametrize("kind", ["numpy", "torch", "buffer"])
def test_strided_specs_are_wrapped_as_they_are(kind: str) -> None:
    """A result may lie in memory in another order than its dimensions."""
    like = pytest.importorskip("torch").zeros(1) if kind == "torch" else np.zeros(1) if kind == "numpy" else b""
    data = np.arange(6, dtype=np.float32)
    spec = TensorSpec("float32", (2, 3), (1, 2))
    result, _ = wrap(memoryview(bytearray(data.tobytes())), spec, describe(like))
    assert describe(result).spec == spec
    assert copied(result) == data.reshape(3, 2).T.tobytes()


def test_wrapped_memory_is_writable_and_bounded(torch: ModuleType) -> None:
    """The caller owns the result; what lies behind it in a longer slot is none of its business."""
    memory = memoryview(bytearray(64))
    spec = TensorSpec.contiguous("int32", (2,))
    array_, _ = wrap(memory, spec, describe(np.zeros(1)))
    tensor, _ = wrap(memory, spec, describe(torch.zeros(1)))
    view, _ = wrap(memory, spec, describe(bytearray(1)))
    array_[0], tensor[1] = 5, 6
    assert view.tolist() == [5, 6]
    assert (array_.nbytes, tensor.untyped_storage().nbytes(), view.nbytes) == (8, 8, 8)


def test_torch_results_are_on_the_cpu_whatever_the_default_device(torch: ModuleType) -> None:
    """set_default_device changes what factory functions make."""
    torch.set_default_device("meta")
    try:
        like = describe(torch.zeros(1, device="cpu"))
        for shape in ((2,), (0, 3)):
            result, _ = wrap(memoryview(bytearray(8)), TensorSpec.contiguous("float32", shape), like)
            assert (result.device.type, tuple(result.shape)) == ("cpu", shape)
    finally:
        torch.set_default_device(None)


# --- other libraries: run where they are installed


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int32", "uint16", "float16", "bfloat16", "float32", *NARROW_DTYPES[:2]]
)
def test_jax_arrays_go_both_ways(dtype: str) -> None:
    """JAX is read and written through DLPack; aligned results are not copied, as far as NumPy can export them."""
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(6).reshape(2, 3).astype(dtype)
    described = describe(x)
    assert (described.kind, described.spec) == ("dlpack", TensorSpec.contiguous(dtype, (2, 3)))
    assert copied(x) == np.asarray(x).tobytes()
    slot = np.zeros(4096 + 64, np.uint8)
    memory = memoryview(slot)[-slot.ctypes.data % 64 :][: described.nbytes]
    copy_into(described, memory)
    released: list[object] = []
    ref = weakref.ref(memory, released.append)
    result, was_copied = wrap(memory, described.spec, described)
    assert isinstance(result, jax.Array)
    assert result.dtype == x.dtype
    assert (result == x).all()
    assert was_copied is (dtype in ("bfloat16", *NARROW_DTYPES))  # which NumPy cannot export
    del memory
    gc.collect()
    assert bool(released) is was_copied
    del result
    gc.collect()
    assert ref() is None
    with pytest.raises(InvalidArgument, match="pass a concrete array"):
        jax.jit(lambda t: describe(t) and t)(x)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint16", "float16", "bfloat16", "float32"])
def test_mlx_arrays_go_both_ways(dtype: str) -> None:
    """MLX copies what it takes in, and the answer says so."""
    mx = pytest.importorskip("mlx.core")
    x = mx.arange(6).reshape(2, 3).astype(mx.bool_ if dtype == "bool" else getattr(mx, dtype))
    described = describe(x)
    assert (described.kind, described.spec) == ("dlpack", TensorSpec.contiguous(dtype, (2, 3)))
    memory = memoryview(bytearray(described.nbytes))
    copy_into(described, memory)
    ref = weakref.ref(memory)
    result, was_copied = wrap(memory, described.spec, described)
    memory[:] = bytes(described.nbytes)
    del memory
    gc.collect()
    assert (type(result), result.dtype, was_copied, ref()) == (mx.array, x.dtype, True, None)
    assert mx.array_equal(result, x)
    assert copied(x.T) == copied(mx.contiguous(x.T))
