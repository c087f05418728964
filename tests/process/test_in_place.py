"""Ops that write into the caller's own tensors: what a worker writes is there, and the rest stays as it was."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import KILL, RAISE, fault
from tests.process.harness import Site

import layerzero as lz

BLOCKS, PAGE, HEADS, DIMS = 3, 4, 2, (8, 6)
SLOTS = (9, -1, 0, 6)


def tensors(slots: Sequence[int] = SLOTS, dtype: str = "float32") -> list[Any]:
    """key, value, k_cache, v_cache and slots, none of them shared."""
    rng = np.random.default_rng(5)
    rows = [rng.standard_normal((len(slots), HEADS, dim)).astype(dtype) for dim in DIMS]
    caches = [rng.standard_normal((BLOCKS, PAGE, HEADS, dim)).astype(dtype) for dim in DIMS]
    return [*rows, *caches, np.array(slots, np.int64)]


def appended(key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any) -> list[np.ndarray]:
    """The caches as they must be, by one assignment for each token."""
    made = []
    for rows, cache in ((key, k_cache), (value, v_cache)):
        changed = np.array(cache)
        for row, slot in zip(rows, slots.tolist(), strict=True):
            if slot >= 0:
                changed[slot // PAGE, slot % PAGE] = row
        made.append(changed)
    return made


def copies() -> list[tuple[str, int]]:
    report = lz.last_report()
    assert report is not None
    return [(copy.arg, copy.nbytes) for copy in report.copies]


@pytest.mark.usefixtures("connected")
class TestInPlace:
    def test_shared_caches_are_written_as_they_lie(self) -> None:
        """A cache is most of an engine's memory: it must never move. Six calls: the last ones go past the broker."""
        key, value, *caches, slots = (lz.share(tensor) for tensor in tensors())
        for _ in range(6):
            expected = appended(key, value, *caches, slots)
            lz.append_kv(key, value, *caches, slots)
            assert copies() == []
            for cache, want in zip(caches, expected, strict=True):
                np.testing.assert_array_equal(cache, want)
            key += 1
        report = lz.last_report()
        assert report is not None
        assert report.path == "express"

    def test_caches_elsewhere_are_copied_there_and_back_and_the_report_says_so(self) -> None:
        """Right in any memory; what it costs is not hidden."""
        given = tensors(dtype="float16")
        expected = appended(*given)
        assert lz.append_kv(*given) is None
        for cache, want in zip(given[2:4], expected, strict=True):
            np.testing.assert_array_equal(cache, want)
        sizes = [(name, tensor.nbytes) for name, tensor in zip(("k_cache", "v_cache"), given[2:4], strict=True)]
        assert [copy for copy in copies() if "cache" in copy[0]] == sizes * 2

    @pytest.mark.parametrize("is_shared", [True, False])
    def test_caches_that_interleave_are_written_each_in_its_own_elements(self, is_shared: bool) -> None:
        """Engines keep keys and values of a block side by side: a copy of all bytes would undo the other's."""
        key, value, cache, _, slots = tensors()
        value = np.ascontiguousarray(key[::-1])
        both = np.stack([cache, cache * 2], 1)
        both = lz.share(both) if is_shared else both
        expected = appended(key, value, both[:, 0], both[:, 1], slots)
        lz.append_kv(key, value, both[:, 0], both[:, 1], slots)
        np.testing.assert_array_equal(both, np.stack(expected, 1))

    def test_reversed_caches_are_written(self) -> None:
        """No spec describes them, so a worker gets a copy."""
        given = tensors()
        whole = [np.array(cache[::-1]) for cache in given[2:4]]
        given[2:4] = [cache[::-1] for cache in whole]
        expected = appended(*given)
        lz.append_kv(*given)
        for cache, want in zip(whole, expected, strict=True):
            np.testing.assert_array_equal(cache[::-1], want)

    @pytest.mark.parametrize("is_shared", [True, False])
    def test_a_worker_that_dies_half_way_is_followed_by_one_that_starts_again(
        self, connected: Site, is_shared: bool
    ) -> None:
        """The second worker finds a cache that the first has written to; the same values go to the same slots."""
        connected.wait_ready("alpha", "beta")
        given = tensors()
        given[0].flat[0] = fault(KILL, "alpha")  # strikes when the first token is stored
        given = [lz.share(tensor) for tensor in given] if is_shared else given
        expected = appended(*given)
        lz.append_kv(*given)
        report = lz.last_report()
        assert report is not None
        assert [(a.backend, a.exit_signal) for a in report.attempts] == [("alpha", signal.SIGKILL), ("beta", None)]
        for cache, want in zip(given[2:4], expected, strict=True):
            np.testing.assert_array_equal(cache, want)

    def test_an_exception_is_followed_by_the_next_kernel(self) -> None:
        """As for any op."""
        given = tensors()
        given[0].flat[0] = fault(RAISE, "alpha")
        expected = appended(*given)
        lz.append_kv(*given)
        np.testing.assert_array_equal(given[2], expected[0])
        np.testing.assert_array_equal(given[3], expected[1])

    def test_a_slot_outside_the_cache_is_the_callers_error_and_nothing_is_written(self) -> None:
        """The cache belongs to many sequences."""
        given = tensors((1, BLOCKS * PAGE))
        before = [np.array(cache) for cache in given[2:4]]
        with pytest.raises(lz.InvalidArgument, match="slot 12"):
            lz.append_kv(*given)
        for cache, want in zip(given[2:4], before, strict=True):
            np.testing.assert_array_equal(cache, want)

    def test_futures_write_when_they_are_asked(self) -> None:
        """lz.submit takes every op."""
        given = tensors()
        expected = appended(*given)
        assert lz.submit(lz.append_kv, *given).result() is None
        np.testing.assert_array_equal(given[2], expected[0])

    def test_no_tokens_write_nothing(self) -> None:
        """An engine's step may have none."""
        given = tensors(())
        expected = appended(*given)
        lz.append_kv(*given)
        np.testing.assert_array_equal(given[2], expected[0])

    def test_what_cannot_be_written_is_refused(self) -> None:
        """An append that is lost makes wrong tokens later, far from its cause."""
        key, value, k_cache, v_cache, slots = tensors()
        frozen = k_cache.copy()
        frozen.flags.writeable = False
        with pytest.raises(lz.InvalidArgument, match="append_kv: k_cache is read-only"):
            lz.append_kv(key, value, frozen, v_cache, slots)
        with pytest.raises(lz.InvalidArgument, match="append_kv: v_cache shares memory with k_cache"):
            lz.append_kv(key, key, k_cache, k_cache, slots)
        with pytest.raises(lz.InvalidArgument, match="append_kv: key shares memory with k_cache, which is written"):
            lz.append_kv(k_cache[0], value, k_cache, v_cache, slots)
        one_block = np.lib.stride_tricks.as_strided(k_cache, k_cache.shape, (0, *k_cache.strides[1:]))
        with pytest.raises(lz.InvalidArgument, match="so elements share memory"):
            lz.append_kv(key, value, one_block, v_cache, slots)

    def test_explain_and_dry_run_write_nothing(self) -> None:
        """They look only."""
        given = tensors()
        before = np.array(given[2])
        assert (lz.explain(lz.append_kv, *given).kernel_id or "").endswith(".append_kv")
        plan = lz.dry_run(lambda: lz.append_kv(*given))
        assert [call.op for call in plan.calls] == ["append_kv"]
        np.testing.assert_array_equal(given[2], before)
