"""workers/providers/_gpu_arrays.py without a GPU: which library an array is of, what is refused, what others read."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import pytest

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.workers.functions.device import Results, Span
from layerzero.workers.providers import _gpu_arrays
from layerzero.workers.providers._gpu_arrays import GpuLibraries, GpuMemory

SPEC = TensorSpec.contiguous("float32", (2, 3))
SPAN = Span(4096, 24, 0)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without either library."""
    monkeypatch.setattr(_gpu_arrays, "_cuda", {})
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(_gpu_arrays, "_is_there", lambda name: sys.modules.get(name) is not None)


def has(monkeypatch: pytest.MonkeyPatch, name: str, *, sees_gpus: bool) -> None:
    module = types.ModuleType(name)
    vars(module).update(cuda=types.SimpleNamespace(is_available=lambda: sees_gpus), __version__="2.4.1+cpu")
    monkeypatch.setitem(sys.modules, name, module)


def test_the_callers_library_is_the_functions_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch, then CuPy."""
    assert _gpu_arrays._chosen("torch") == ""
    has(monkeypatch, "cupy", sees_gpus=True)
    assert {_gpu_arrays._chosen(name) for name in ("torch", "cupy", "dlpack")} == {"cupy"}
    monkeypatch.setattr(_gpu_arrays, "_cuda", {})
    has(monkeypatch, "torch", sees_gpus=True)
    assert [_gpu_arrays._chosen(name) for name in ("torch", "cupy", "dlpack")] == ["torch", "cupy", "torch"]


def test_a_library_without_cuda_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied to the CPU."""
    has(monkeypatch, "torch", sees_gpus=False)
    text = r"\Apass it with \.cpu\(\), or have torch with CUDA .*: torch 2\.4\.1\+cpu"
    with pytest.raises(InvalidArgument, match=text):
        GpuLibraries().open("torch", SPEC, SPAN, 7)


def test_a_call_without_arrays_has_a_library_that_can_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its stream and GPU, also one that the function's module has loaded; what is loaded comes before what is not;
    none where others may make arrays."""
    entered: list[Any] = []

    def enter(name: str) -> Any:
        return lambda *its: (lambda: contextlib.nullcontext(entered.append((name, *its))),)

    monkeypatch.setattr(_gpu_arrays, "_ENTER", {name: enter(name) for name in ("torch", "cupy")})
    libraries = GpuLibraries()
    with libraries.on_stream(7, 1):
        libraries.enter()
        has(monkeypatch, "torch", sees_gpus=False)
        text = r"\Aleave device= out, or have torch with CUDA .*: torch 2\.4\.1\+cpu"
        with pytest.raises(InvalidArgument, match=text):
            libraries.enter()
        assert entered == []
        monkeypatch.setattr(_gpu_arrays, "_cuda", {})
        has(monkeypatch, "cupy", sees_gpus=True)
        libraries.enter()
        libraries.enter()
        assert entered == [("cupy", 7, 1)]
    monkeypatch.setattr(_gpu_arrays, "_cuda", {})
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(_gpu_arrays, "_is_there", lambda _: pytest.fail("CuPy is loaded, and can use the GPU"))
    with libraries.on_stream(8, 0):
        libraries.enter()
    assert entered[1:] == [("cupy", 8, 0)]


def test_without_a_library_others_read_the_memory() -> None:
    """Read-only, in the order of the call's stream."""
    array = GpuLibraries().open("torch", SPEC, SPAN, 7)
    assert isinstance(array, GpuMemory)
    assert array.__cuda_array_interface__ == {
        "shape": (2, 3),
        "typestr": "<f4",
        "data": (4096, True),
        "strides": None,
        "version": 3,
        "stream": 7,
    }
    turned = GpuMemory(TensorSpec("int64", (3, 2), (1, 3)), Span(4096, 48, 0), 7).__cuda_array_interface__
    assert (turned["strides"], turned["typestr"]) == ((8, 24), "<i8")
    assert not hasattr(GpuMemory(TensorSpec.contiguous("bfloat16", (2,)), SPAN, 7), "__cuda_array_interface__")
    assert array.__dlpack_device__() == (2, 0)


class Foreign:
    """An array of a library that nobody knows."""

    def __init__(self, **changes: Any) -> None:
        told = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = {**told, **changes}


def test_results_of_other_libraries_are_read_by_their_interface() -> None:
    """Dense ones of dtypes that we know."""
    found = GpuLibraries().found(Foreign(), 0)
    assert found is not None
    assert (found.spec, found.pointer) == (SPEC, 4096)
    assert GpuLibraries().found(Foreign(strides=(12, 4)), 0) is not None
    with pytest.raises(InvalidArgument, match="return a contiguous copy"):
        GpuLibraries().found(Foreign(strides=(4, 8)), 0)
    with pytest.raises(InvalidArgument, match="allowed"):
        GpuLibraries().found(Foreign(typestr="<c8"), 0)
    assert GpuLibraries().found("text", 0) is None


@pytest.mark.parametrize(
    ("specs", "is_given", "fits"),
    [
        ([SPEC], False, True),
        ([SPEC, SPEC], False, False),
        ([TensorSpec.contiguous("float32", (3, 2))], False, False),
        ([], False, False),
        ([SPEC], True, False),
    ],
)
def test_results_go_to_memory_that_is_as_they_are(specs: list[TensorSpec], is_given: bool, fits: bool) -> None:
    """In their order; of memory that the function was given to what lies there alone."""
    found = GpuLibraries().found(Foreign(), 0)
    assert found is not None
    results = Results([(spec, Span(8192, 24, 0)) for spec in specs], is_given=is_given)
    results.add(found)
    assert results.have_room is fits
    given = Results([(specs[0] if specs else SPEC, SPAN)], is_given=True)
    given.add(found)
    assert given.have_room is (not specs or specs[0] == SPEC)


def test_a_library_whose_stream_cannot_be_entered_leaves_none_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else later calls would enqueue on a stream of another one's."""
    said: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            if self.name == "cupy":
                raise RuntimeError("out of memory")
            said.append(f"enter {self.name}")

        def __exit__(self, *_: object) -> None:
            said.append(f"leave {self.name}")

    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(_gpu_arrays._cuda, name, True)
    entering = {name: lambda *_, name=name: (Stream(name),) for name in ("torch", "cupy")}
    monkeypatch.setattr(_gpu_arrays, "_ENTER", entering)
    with pytest.raises(RuntimeError, match="out of memory"), _gpu_arrays.GpuLibraries().on_stream(5, 0):
        pass
    assert said == ["enter torch", "leave torch"]
