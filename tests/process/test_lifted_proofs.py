"""Processes that try lifted calls, and the thread that starts them: what one kernel does to its process costs others
that came with it nothing. Over the GPU of threads."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.gpu_site import SOFT, soft
from tests.process.harness import PATIENCE_S, wait_until
from tests.process.lifted_site import kernels
from tests.soft_gpu import soft_gpu
from tests.soft_gpu.soft_kernels import tensor_words
from tests.soft_gpu.soft_lifts import at

from layerzero.broker.lifting import proofs as proofs_module
from layerzero.broker.lifting.proofs import Proofs
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.lifting.form import Kernel, Lifted, Patch, Span, digest
from layerzero.ipc.lifting.launch import LoadedCall
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.ipc.lifting.results import read_digest, read_sample
from layerzero.ipc.lifting.specimen import Specimen
from layerzero.ipc.lifting.trial import pattern, write
from layerzero.ipc.vocabulary.tensors import TensorSpec

__all__ = ["kernels", "soft"]
SPEC = TensorSpec.contiguous("float32", (1000,))
SEEDS = (1, 2)
WORDS = len(tensor_words(0, SPEC))


def lifted(variant: str = "") -> Specimen:
    """silu of a worker whose kernel may do what it must not, once it is tried (soft_faults.py)."""
    name = f"silu<float>{variant and '/'}{variant}"
    code = b"soft:" + name.encode()
    patches = (Patch(0, at("output")), Patch(WORDS, at("input")))
    params = tensor_words(0, SPEC) * 2
    kernel = Kernel(digest(code), name, (1, 1, 1), (1, 1, 1), 0, params, (Span(0, WORDS), Span(WORDS, WORDS)), patches)
    made = Lifted("silu", "one.silu", (SPEC,), (SPEC,), {}, (16, 16), (), (kernel,))
    return Specimen(made, {digest(code): code}, {})


def specimen(variant: str = "", read: Callable[[int, int], str | bytes] | None = None) -> bytes:
    """With what `read(address, seed)` says of its output; its digest, if left out."""
    made, driver = lifted(variant), soft_gpu.driver
    with Context(driver, soft_gpu.UUID):  # type: ignore[arg-type]
        modules = {name: driver.load_module(code) for name, code in made.codes.items()}  # type: ignore[attr-defined]
        call, (x, y) = LoadedCall(driver, made.lifted, modules), (driver.allocate(SPEC.span_bytes) for _ in "xy")  # type: ignore[arg-type]
        trials = {}
        for seed in SEEDS:
            write(driver, x, SPEC.span_bytes, pattern("silu", "x", {"x": SPEC}, seed), 0)  # type: ignore[arg-type]
            call.launch([x], [y], [], 0)
            trials[seed] = (read_digest(driver, y, SPEC.span_bytes, 0) if read is None else read(y, seed),)  # type: ignore[arg-type]
    return Specimen(made.lifted, made.codes, trials).pack()


def provers() -> list[int]:
    """Processes of this one that try lifted calls, and have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"layerzero.workers.prove" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.fixture
def prove(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """The verdicts on specimens that are asked for at once."""
    monkeypatch.setenv("PYTHONPATH", str(SOFT / "broker"))
    woken = threading.Event()
    proofs = Proofs(woken.set)

    def prove(*data: bytes) -> list[Any]:
        for number, one in enumerate(data):
            proofs.start(number, soft_gpu.UUID, one)
        found: dict[int, Any] = {}

        def are_all_told() -> bool:
            assert woken.wait(PATIENCE_S)
            woken.clear()
            found.update((ended.number, ended.verdict.reason) for ended in proofs.ended())
            return len(found) == len(data)

        while not are_all_told():
            pass
        assert not any(proofs.has(number) for number in found)
        return [found[number] for number in range(len(data))]

    yield prove
    proofs.close()


def test_each_gets_its_own_verdict_whatever_the_others_do(prove: Callable[..., list[Any]]) -> None:
    good, bad = specimen(), {name: specimen(name) for name in ("exits", "aborts", "strikes", "table", "strays")}
    unlike = Specimen(lifted().lifted, lifted().codes, dict.fromkeys(SEEDS, ("0" * 40,))).pack()
    found = prove(good, bad["exits"], good, bad["strikes"], bad["aborts"], good, bad["strays"], unlike, good)
    faulted = LiftReason.PROOF_FAULTED
    expected = [None, faulted, None, faulted, faulted, None, LiftReason.PROOF_STRAYS, LiftReason.PROOF_DIFFERS, None]
    assert found == expected


def test_numbers_of_a_sample_may_round_otherwise_and_not_be_others(prove: Callable[..., list[Any]]) -> None:
    def numbers(address: int, seed: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(read_sample(soft_gpu.driver, address, SPEC, seed, 0), "float32")  # type: ignore[arg-type]

    rounded = specimen(read=lambda *its: (numbers(*its) * np.float32(1 + 1e-6)).tobytes())
    others = specimen(read=lambda *its: np.roll(numbers(*its), 1).tobytes())
    assert prove(rounded, others) == [None, LiftReason.PROOF_DIFFERS]


def test_one_that_does_not_end_is_ended_and_the_next_is_tried(
    prove: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, late = specimen(), specimen("hangs")
    assert prove(good) == [None]  # all that its process imports has been read by now
    monkeypatch.setattr(proofs_module, "TIMEOUT_S", 10.0)
    assert prove(good, late, good) == [None, LiftReason.PROOF_LATE, None]


def test_closing_ends_what_is_tried(prove: Callable[..., list[Any]]) -> None:
    proofs = Proofs(lambda: pytest.fail("something was told"))
    proofs.start(1, soft_gpu.UUID, specimen("hangs"))
    wait_until(provers)
    proofs.close()
    wait_until(lambda: not provers())


def test_one_process_tries_what_comes_soon_and_ends_when_nothing_does(
    prove: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = specimen()
    assert prove(good) == [None]
    (pid,) = provers()
    assert prove(good, good) == [None, None]
    assert provers() == [pid]
    monkeypatch.setattr(proofs_module, "AT_MOST", 4)
    assert prove(good, good) == [None, None]
    (other,) = provers()
    assert other != pid
    monkeypatch.setattr(proofs_module, "IDLE_S", 0.01)
    assert prove(good) == [None]
    wait_until(lambda: not provers())
    assert prove(good) == [None]


def test_one_that_died_while_nothing_was_tried_is_replaced(prove: Callable[..., list[Any]]) -> None:
    good = specimen()
    assert prove(good) == [None]
    (pid,) = provers()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid not in provers())
    assert prove(good) == [None]
