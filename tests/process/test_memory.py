"""Client memory: what crosses without a copy, what out= may overlap, who keeps results alive, that slots come back."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.backends.toy import HALF, KILL, WRITE_INPUT, fault
from tests.process.harness import Site, wait_until

import layerzero as lz
from layerzero.client.connection.arena import pool


def silu(x: np.ndarray) -> np.ndarray:
    wide = np.asarray(x, np.float64)
    with np.errstate(over="ignore"):
        return wide / (1 + np.exp(-wide))


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def report() -> lz.SelectionReport:
    found = lz.last_report()
    assert found is not None
    return found


def shared_bytes() -> int:
    """What the kernel holds for this process's arenas."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(entry) == "/memfd:layerzero (deleted)":
                stat = entry.stat()
                found[stat.st_ino] = 512 * stat.st_blocks
    return sum(found.values())


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.usefixtures("connected")
class TestZeroCopy:
    def test_shared_input_and_empty_output_cross_without_a_copy(self) -> None:
        """The promise of the library: tensors never move."""
        x, out = lz.share(numbers(100)), lz.empty(100, np.float32)
        before = address(out)
        assert lz.silu(x, out=out) is out
        assert report().copies == ()
        assert address(out) == before
        np.testing.assert_allclose(out, silu(x), rtol=1e-6)

    def test_a_result_is_the_next_calls_input_without_a_copy(self) -> None:
        """Chains of ops pay for the first input only."""
        y = lz.silu(lz.silu(numbers(100)))
        assert report().copies == ()
        np.testing.assert_allclose(y, silu(silu(numbers(100))), rtol=1e-5)

    def test_share_returns_what_is_shared_already(self) -> None:
        """Sharing twice must not move weights a second time."""
        x = lz.share(numbers(10))
        assert lz.share(x) is x
        nested = lz.share({"a": [numbers(2)], "b": (x,)})
        assert nested["b"][0] is x
        assert lz.silu(nested["a"][0]).shape == (2,)
        assert report().copies == ()

    @pytest.mark.parametrize("alike", [lz.empty_like, lambda x: lz.empty(x.shape, x.dtype), lambda x: lz.empty(10)])
    def test_empty_is_of_the_shape_and_dtype_asked_for(self, alike: Callable[[np.ndarray], np.ndarray]) -> None:
        """All three spellings give arena memory, aligned for any library."""
        x = alike(numbers(10))
        assert (x.shape, x.dtype) == ((10,), np.float32)
        assert address(x) % 64 == 0
        x[...] = 1
        lz.silu(x)
        assert report().copies == ()

    def test_more_than_the_machine_has_is_out_of_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel has no limit for shared memory: it would fill the machine and then kill some process. Nothing may
        be reserved before memory was asked for, so reserving ends this test in case it is tried."""

        def reserve(fd: int, offset: int, nbytes: int) -> None:
            raise AssertionError(f"{nbytes} bytes would have been reserved")

        monkeypatch.setattr(os, "posix_fallocate", reserve)
        with pytest.raises(lz.OutOfMemory, match="4 TiB of shared memory are asked for, and the machine has") as caught:
            lz.empty((1 << 40,))
        assert caught.value.facts["nbytes"] == 1 << 42 > caught.value.facts["available_bytes"]

    @pytest.mark.parametrize("call", [lz.silu, lz.share, lz.empty_like, lambda x: lz.silu(x[::2])])
    def test_copies_results_and_shares_ask_for_memory_too(
        self, monkeypatch: pytest.MonkeyPatch, call: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Here by a margin that no machine has; the session serves the next call."""
        pool.stats()  # closes what earlier tests left; of the rest, nothing has room for this
        x = np.zeros(100 << 20, np.float32)
        monkeypatch.setenv("LAYERZERO_MEMORY_MARGIN_MIB", str(1 << 30))
        with pytest.raises(lz.OutOfMemory, match="MiB of shared memory are asked for"):
            call(x)
        monkeypatch.delenv("LAYERZERO_MEMORY_MARGIN_MIB")
        assert lz.silu(x[:10]).shape == (10,)

    def test_freed_results_give_their_pages_back(self) -> None:
        """A service that kept a large batch once must not hold its memory for ever; up to 256 MiB are kept for the next
        calls. The broker and the worker have maps of the same pages, and a result that is kept is untouched."""
        x = lz.share(numbers(1 << 20))
        results = [lz.silu(x) for _ in range(120)]
        assert shared_bytes() > 480 << 20
        kept = results[60]
        del results
        assert shared_bytes() <= (256 + 4 + 4) << 20
        again = [lz.silu(x) for _ in range(120)]
        for result in (kept, *again[::40]):
            np.testing.assert_allclose(result, silu(x), rtol=1e-5)

    def test_copies_are_reported_with_bytes_and_reason(self) -> None:
        """A copy nobody knows of is a performance bug nobody finds."""
        lz.silu(numbers(6, 4), out=np.empty((6, 4), np.float32))
        assert [(c.arg, c.nbytes, c.where) for c in report().copies] == [("x", 96, "client"), ("out", 96, "client")]
        assert all("arena" in c.reason for c in report().copies)
        lz.silu(lz.share(numbers(6, 4))[:, ::-1])
        assert [(c.arg, c.nbytes) for c in report().copies] == [("x", 96)]
        assert "strides" in report().copies[0].reason


@pytest.mark.usefixtures("connected")
class TestOut:
    @pytest.mark.parametrize("is_shared", [True, False])
    def test_strided_out_gets_the_result_and_nothing_around_it(self, is_shared: bool) -> None:
        """out= is often a slice of a larger buffer, whose other elements are in use."""
        whole = np.full((6, 8), 5, np.float32)
        whole = lz.share(whole) if is_shared else whole
        view = whole[1::2, 2:6]
        x = numbers(3, 4)
        assert lz.silu(x, out=view) is view
        np.testing.assert_allclose(view, silu(x), rtol=1e-6)
        view[...] = 5
        np.testing.assert_array_equal(whole, 5)

    @pytest.mark.parametrize("shift", [0, 1, -1])
    def test_out_over_an_input_is_computed_from_the_old_input(self, shift: int) -> None:
        """In-place activation and shifted windows: the kernel must not read what it has just written."""
        buffer = lz.share(numbers(10))
        x, out = buffer[1:9], buffer[1 + shift : 9 + shift]
        wanted = silu(x)
        lz.silu(x, out=out)
        np.testing.assert_allclose(out, wanted, rtol=1e-6)

    def test_out_over_an_input_is_right_when_the_first_worker_dies_halfway(self, connected: Site) -> None:
        """The fallback must see the input as it was, not the ruins of the first attempt."""
        connected.wait_ready("alpha", "beta")
        x = lz.share(np.array([fault(HALF, "alpha"), 1, 2, 3], np.float32))
        wanted = silu(x)
        lz.silu(x, out=x)
        assert [(a.backend, a.exit_signal) for a in report().attempts] == [("alpha", signal.SIGKILL), ("beta", None)]
        np.testing.assert_allclose(x, wanted, rtol=1e-6)

    def test_direct_out_is_right_when_the_first_worker_dies_halfway(self, connected: Site) -> None:
        """What the dead worker had written is overwritten in full."""
        connected.wait_ready("alpha", "beta")
        x, out = lz.share(np.array([fault(HALF, "alpha"), 1, 2, 3], np.float32)), lz.empty(4)
        lz.silu(x, out=out)
        assert report().attempts[0].exit_signal == signal.SIGKILL
        assert report().copies == ()
        np.testing.assert_allclose(out, silu(x), rtol=1e-6)

    def test_out_that_cannot_take_the_result_is_refused(self) -> None:
        """out= is never resized, converted or written in an order that depends on the kernel."""
        x = numbers(4)
        frozen = np.empty(4, np.float32)
        frozen.flags.writeable = False
        for out, why in (
            (np.empty(5, np.float32), "out is"),
            (np.empty(4, np.float64), "out is"),
            (frozen, "read-only"),
            (np.lib.stride_tricks.as_strided(np.empty(1, np.float32), (4,), (0,)), "share memory|read-only"),
        ):
            with pytest.raises(lz.InvalidArgument, match=why):
                lz.silu(x, out=out)


class TestWorkersCannotHarmInputs:
    @pytest.mark.parametrize("is_shared", [True, False])
    def test_a_kernel_that_writes_its_input_dies_alone(self, connected: Site, is_shared: bool) -> None:
        """Some libraries change their inputs; here they hit a read-only page instead of the caller's data."""
        connected.wait_ready("alpha", "beta")
        x = np.array([fault(WRITE_INPUT, "alpha"), 1, 2], np.float32)
        before = x.copy()
        x = lz.share(x) if is_shared else x
        result = lz.silu(x)
        assert [(a.backend, a.exit_signal) for a in report().attempts] == [("alpha", signal.SIGSEGV), ("beta", None)]
        np.testing.assert_array_equal(x, before)
        np.testing.assert_allclose(result, silu(before), rtol=1e-6)

    def test_a_worker_maps_inputs_without_the_right_to_write(self, connected: Site) -> None:
        """Seen from the kernel: every arena is there twice, once read-only."""
        (alpha,) = connected.wait_ready("alpha")
        lz.silu(numbers(3))
        rights = [
            line.split()[1]
            for line in Path(f"/proc/{alpha}/maps").read_text().splitlines()
            if "memfd:layerzero" in line
        ]
        assert rights.count("r--s") == rights.count("rw-s") == len(rights) / 2 > 0


class TestLifetime:
    @pytest.mark.usefixtures("connected")
    def test_a_slot_is_free_when_the_last_view_of_its_array_is_gone(self) -> None:
        """Views keep memory alive as in NumPy; nothing else does."""
        before = pool.stats()["slots"]
        view = lz.silu(numbers(100))[10:20].reshape(2, 5)
        gc.collect()
        assert pool.stats()["slots"] == before + 1
        np.testing.assert_allclose(view.ravel(), silu(numbers(100))[10:20], rtol=1e-6)
        del view
        assert pool.stats()["slots"] == before

    @pytest.mark.usefixtures("connected")
    def test_ten_thousand_calls_leave_the_pool_as_it_was(self) -> None:
        """A service runs for months; memory must not grow with calls."""
        x = numbers(16)
        for _ in range(16):  # a lane has memory of its own for inputs, as long as it is there
            lz.silu(x)
        before = pool.stats()
        for _ in range(10_000):
            lz.silu(x)
        assert pool.stats() == before

    @pytest.mark.usefixtures("connected")
    def test_large_results_reuse_their_arena(self) -> None:
        """Arenas of one big slot are reused, not made anew for each call."""
        x = lz.share(numbers(3 << 20))
        lz.silu(x)
        before = pool.stats()
        for _ in range(5):
            lz.silu(x)
        assert pool.stats() == before

    def test_results_survive_disconnect_and_the_brokers_death(self, new_site: Callable[..., Site]) -> None:
        """Memory belongs to the caller: what it was given stays, whatever happens to the processes."""
        site = new_site()
        site.connect()
        first = lz.silu(numbers(100))
        lz.disconnect()
        np.testing.assert_allclose(first, silu(numbers(100)), rtol=1e-6)
        session = site.connect()
        second = lz.silu(first)
        os.kill(session.broker_pid, signal.SIGKILL)
        wait_until(lambda: not session.is_alive)
        gc.collect()
        np.testing.assert_allclose(second, silu(silu(numbers(100))), rtol=1e-5)
        site.connect()
        np.testing.assert_allclose(lz.silu(second), silu(silu(silu(numbers(100)))), rtol=1e-5)
        assert report().copies == ()
        del first, second

    def test_inputs_and_outputs_of_a_failed_call_are_given_back(self, connected: Site) -> None:
        """Errors must not leak what successes free."""
        connected.wait_ready("gamma")
        before = pool.stats()["slots"]
        with pytest.raises(lz.BackendError) as failure:
            lz.silu(np.array([fault(KILL)]), backend="gamma")
        del failure
        wait_until(lambda: gc.collect() >= 0 and pool.stats()["slots"] == before)
