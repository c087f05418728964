"""Machine code as CUPTI shows it: what is kept, whose it is, and where there is no CUPTI."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int, c_size_t, c_uint32, c_void_p
from pathlib import Path

import pytest

from layerzero.ipc.lifting.form import digest
from layerzero.workers.gpu.lifting import modules
from layerzero.workers.gpu.lifting.modules import VARIABLE, Modules, find, watch

CALLS, RESOURCES, LOADED, LOAD, GET_FUNCTION = 1, 3, 6, 19, 23


def image(*kernels: str, rest: str = "") -> bytes:
    """As far as anybody looks, machine code."""
    sections = ["", ".shstrtab", *(f".text.{name}" for name in kernels), *(f".rela.text.{name}" for name in kernels)]
    return b"\x7fELF" + rest.encode() + b"\0".join(one.encode() for one in sections) + b"\0"


class Cupti:
    """In the place of libcupti."""

    def __init__(self, subscribes: int = 0, enables: int = 0) -> None:
        self._answers = subscribes, enables
        self.callback: Callable[..., None] | None = None
        self.enabled: list[tuple[int, ...]] = []
        self.is_subscribed = False

    def cuptiSubscribe(self, subscriber: object, callback: Callable[..., None], user: object) -> int:
        self.callback, self.is_subscribed = callback, not self._answers[0]
        return self._answers[0]

    def cuptiUnsubscribe(self, subscriber: object) -> int:
        self.is_subscribed = False
        return 0

    def cuptiEnableDomain(self, enable: int, subscriber: object, domain: int) -> int:
        self.enabled.append((domain,))
        return self._answers[1]

    def cuptiEnableCallback(self, enable: int, subscriber: object, domain: int, which: int) -> int:
        self.enabled.append((domain, which))
        return 0

    def load(self, data: bytes) -> None:
        """The driver loads a module."""

        class Module(ctypes.Structure):
            _fields_ = [("id", c_uint32), ("nbytes", c_size_t), ("image", c_void_p)]

        kept = ctypes.create_string_buffer(data, len(data))
        module = Module(7, len(data), ctypes.addressof(kept))
        self._tell(RESOURCES, LOADED, (c_void_p * 3)(1, 2, ctypes.addressof(module)))

    def call(self, which: int, handle: int, *loads: bytes, number: int = 0) -> None:
        """The driver is called, and loads modules meanwhile."""

        class Call(ctypes.Structure):
            _fields_ = [("site", c_int), ("name", c_void_p), ("params", c_void_p), ("result", POINTER(c_int))]

        module, result = c_void_p(handle), c_int(number)
        params = (c_void_p * 3)(ctypes.addressof(module), handle, 0)
        if which == LOAD:
            params[1] = 0xDEAD
        for site in (0, 1):
            self._tell(CALLS, which, Call(site, None, ctypes.addressof(params), ctypes.pointer(result)))
            for one in loads if site == 0 else ():
                self.load(one)

    def _tell(self, domain: int, which: int, data: object) -> None:
        assert self.callback is not None
        self.callback(None, domain, which, ctypes.addressof(data))  # type: ignore[arg-type]


@pytest.fixture
def cupti() -> Cupti:
    return Cupti()


@pytest.fixture
def seen(cupti: Cupti) -> Modules:
    seen = watch({VARIABLE: "here"}, load=lambda path: cupti)
    assert (seen.problem, cupti.is_subscribed) == ("", True)
    assert (RESOURCES,) in cupti.enabled
    return seen


def test_code_is_found_by_the_kernel_in_it(cupti: Cupti, seen: Modules) -> None:
    """A name is a whole one: many begin alike."""
    one, other = image("_Z4addf", "_Z4addfi"), image("_Z4add")
    cupti.load(one)
    cupti.load(other)
    assert seen.find("_Z4addf", 0) == digest(one)
    assert seen.find("_Z4add", 0) == digest(other)
    assert seen.find("_Z4ad", 0) is None
    assert seen.image(digest(one)) == one


def test_each_image_is_kept_once(cupti: Cupti, seen: Modules) -> None:
    """Libraries load and unload the same code again and again."""
    for _ in range(3):
        cupti.load(image("a"))
    assert len(seen._images) == 1


def test_of_kernels_with_one_name_the_function_s_module_tells(cupti: Cupti, seen: Modules) -> None:
    """Triton compiles a kernel for each dtype, all under one name."""
    first, second, third = (image("silu", rest=text) for text in ("bf16", "fp16", "fp32"))
    cupti.call(LOAD, 0x10, first)
    cupti.call(LOAD, 0x20, second)
    cupti.load(third)
    assert seen.find("silu", 0x10) == digest(first)
    assert seen.find("silu", 0x20) == digest(second)
    assert seen.find("silu", 0x30) == digest(third)


def test_module_that_comes_when_its_function_is_asked_for_is_known(cupti: Cupti, seen: Modules) -> None:
    """CUDA loads lazily."""
    first, second = image("k", rest="1"), image("k", rest="2")
    cupti.call(LOAD, 0x10)
    cupti.call(LOAD, 0x20)
    cupti.call(GET_FUNCTION, 0x10, first)
    cupti.call(GET_FUNCTION, 0x20, second)
    cupti.call(GET_FUNCTION, 0x20)
    assert [seen.find("k", module) for module in (0x10, 0x20)] == [digest(first), digest(second)]


def test_handle_that_is_used_again_is_another_module_s(cupti: Cupti, seen: Modules) -> None:
    """And a call that failed has made none."""
    first, second = image("k", rest="1"), image("k", rest="2")
    cupti.call(LOAD, 0x10, first)
    cupti.call(LOAD, 0x10, image("k", rest="3"), number=2)
    assert seen.find("k", 0x10) == digest(first)
    cupti.call(LOAD, 0x10, second)
    assert seen.find("k", 0x10) == digest(second)


def test_an_event_that_makes_no_sense_does_no_harm(cupti: Cupti, seen: Modules) -> None:
    """The driver has called; an exception would go nowhere."""
    assert cupti.callback is not None
    cupti.callback(None, RESOURCES, LOADED, None)
    cupti.callback(None, CALLS, LOAD, None)
    assert seen.problem.startswith("machine code was missed: ValueError")


@pytest.mark.parametrize(("answers", "problem"), [((39, 0), "cuptiSubscribe returned 39"), ((0, 1), "EnableDomain")])
def test_a_profiler_in_the_way_is_told(answers: tuple[int, int], problem: str) -> None:
    cupti = Cupti(*answers)
    seen = watch({VARIABLE: "here"}, load=lambda path: cupti)
    assert seen.problem.startswith("here: ")
    assert problem in seen.problem
    assert not cupti.is_subscribed


def test_library_that_cannot_be_loaded_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str) -> object:
        raise OSError(f"{path}: wrong ELF class")

    assert "wrong ELF class" in watch({VARIABLE: "/x/libcupti.so"}, load=load).problem
    monkeypatch.setattr(modules, "_IN_TOOLKITS", ())
    assert "no libcupti" in watch({}, []).problem


def test_library_is_found_in_wheels_newest_first(tmp_path: Path) -> None:
    """A worker's own environment comes before the machine's toolkit."""
    for place in ("nvidia/cu13/lib/libcupti.so.13", "nvidia/cuda_cupti/lib/libcupti.so.12"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).touch()
    found = find({}, ["", str(tmp_path / "none"), str(tmp_path)])
    assert sorted(found[:2]) == sorted(
        str(tmp_path / place) for place in ("nvidia/cu13/lib/libcupti.so.13", "nvidia/cuda_cupti/lib/libcupti.so.12")
    )
    assert len(found) == len(set(found))
    assert find({VARIABLE: "/one"}, [str(tmp_path)]) == ["/one"]
