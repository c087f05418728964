"""Sums of two GPUs that read each other's memory: no order of the two makes one read what is not there yet, or not any
more; how both ranks come to them, or do not. Without a GPU: what is enqueued is noted, and done in all orders."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from tests.unit.ipc.fake_cuda import FakeDriver, FakeGpu, error

from layerzero.groups import one_shot, one_shot_trial
from layerzero.groups.group import Group
from layerzero.groups.joint import exchange
from layerzero.groups.nccl import Nccl
from layerzero.groups.one_shot import OneShot, retire, sweep
from layerzero.groups.one_shot_trial import Sum
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.errors import CudaError, GroupBroken, ProtocolError

NBYTES = 4096
SUM = Sum("float32", (NBYTES // 4,), True)


class Tensor:
    """`place`: its address, of memory of the GPU's; `value`: what all its elements are, once the stream was there."""

    def __init__(self, nbytes: int = NBYTES, dtype: str = "float32", place: int = 0) -> None:
        self.nbytes, self.dtype, self.shape, self.place = nbytes, f"torch.{dtype}", (nbytes // 4,), place
        self.value: Any = None

    def data_ptr(self) -> int:
        return self.place

    def copy_(self, other: Tensor) -> None:
        stream.append(("store", self.place, other))


stream: list[tuple[Any, ...]] = []  # what the rank that is recorded now has enqueued


class Torch:
    """Of one process for both ranks."""

    cuda = SimpleNamespace(current_stream=lambda ordinal: SimpleNamespace(cuda_stream=7))

    @staticmethod
    def from_dlpack(export: Any) -> Tensor:
        export.__dlpack__(stream=1)
        return Tensor(place=int(export._managed.tensor.data))

    @staticmethod
    def add(x: Tensor, theirs: Tensor, out: Tensor | None) -> Tensor:
        made = out or Tensor()
        stream.append(("add", x, theirs.place, made))
        return made


class Driver(FakeDriver):
    def tell_and_take(self, stream_: int, told: int, taken: int) -> None:
        stream.append(("meet", told, taken))

    def write_value(self, stream_: int, address: int, value: int) -> None:
        stream.append(("write", address, value))


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "torch", Torch)  # type: ignore[arg-type]
    stream.clear()
    yield
    one_shot._idle.clear()
    one_shot._retired.clear()


def context(gpu: FakeGpu) -> Context:
    driver = Driver(gpu)
    return Context(driver, driver.uuid)  # type: ignore[arg-type]


@pytest.fixture
def both() -> Iterator[list[OneShot]]:
    gpu = FakeGpu()
    made = [OneShot(context(gpu), rank, NBYTES) for rank in range(2)]
    page = OneShot.new_page()
    for rank, one in enumerate(made):
        one.join(made[1 - rank].offer(), page)
    os.close(page)
    yield made
    for one in made:
        one.close()


# --- the order of what two GPUs do


class Simulated:
    """One rank's stream, step by step. The words are the page's own."""

    def __init__(self, rank: int, ops: list[tuple[Any, ...]], memory: dict[int, Any], made: OneShot) -> None:
        self.rank, self.ops, self.at = rank, ops, 0
        self._memory, self._made, self._has_told = memory, made, False

    def _word(self, address: int) -> Any:
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._made._page))  # type: ignore[arg-type]
        return ctypes.c_uint32.from_address(base + address - self._made._words)

    def step(self) -> bool:
        """Whether there was anything to do."""
        if self.at == len(self.ops):
            return False
        kind, *rest = self.ops[self.at]
        if kind == "store":
            self._memory[self._where(rest[0], is_own=True)] = rest[1].value
        elif kind == "add":
            x, theirs, out = rest
            own = self._memory[self._where(x.place, is_own=True)] if x.place else x.value
            out.value = own + self._memory[self._where(theirs, is_own=False)]
        elif kind == "write":
            self._word(rest[0]).value = rest[1]
        elif kind == "set":
            rest[0].value = rest[1]
            if rest[0].place:
                self._memory[self._where(rest[0].place, is_own=True)] = rest[1]
        elif kind == "check":
            assert rest[0].value == rest[1], f"rank {self.rank} read what is not there yet, or not any more"
        elif not self._has_told:
            self._word(rest[0]).value, self._has_told = 1, True
            return True
        elif self._word(rest[1]).value != 1:
            return False
        else:
            self._word(rest[1]).value, self._has_told = 0, False
        self.at += 1
        return True

    def _where(self, address: int, *, is_own: bool) -> tuple[int, int]:
        base = self._made._memory.address if is_own else self._made._theirs
        return (self.rank if is_own else 1 - self.rank), address - base


def ops_of(made: OneShot, rank: int, sums: int, runs: int) -> list[tuple[Any, ...]]:
    """Of a graph with so many sums that is launched so often; each sum's result is looked at. Every third summand is
    not made in its place."""
    stream.clear()
    made.begin()
    found: list[tuple[Tensor, Tensor, list[tuple[Any, ...]]]] = []
    for number in range(sums):
        x = made.place("float32", (NBYTES // 4,)) if number % 3 < 2 else Tensor()
        before = len(stream)
        result = made.add_up(x, x if number % 3 == 2 else None)
        assert (result is x) == (number % 3 == 2)
        found.append((x, result, stream[before:]))
    before = len(stream)
    made.end()
    end = stream[before:]
    done: list[tuple[Any, ...]] = []
    for run in range(runs):
        for number, (x, result, ops) in enumerate(found):
            own, other = (1 + 1000 * who + 10 * number + 100_000 * run for who in (rank, 1 - rank))
            done += [("set", x, own), *ops, ("check", result, own + other)]
        done += end
    return done


@pytest.mark.parametrize("sums", [1, 2, 3, 4])
def test_no_order_of_two_gpus_gives_another_sum(both: list[OneShot], sums: int) -> None:
    recorded = [ops_of(one, rank, sums, runs=4) for rank, one in enumerate(both)]
    for seed in range(300):
        chance, memory = random.Random(seed), dict[Any, Any]()
        ranks = [Simulated(rank, recorded[rank], memory, one) for rank, one in enumerate(both)]
        favourite = chance.random()
        while any(rank.at < len(rank.ops) for rank in ranks):
            order = ranks if chance.random() < favourite else ranks[::-1]
            assert any(rank.step() for rank in order), "both wait"


def test_memory_serves_nothing_else_before_the_other_gpu_has_read_it(both: list[OneShot]) -> None:
    """A rank may be through, and its plan forgotten, while the other has yet to read its last summand."""
    waited = 0
    for seed in range(100):
        chance, memory = random.Random(seed), dict[Any, Any]()
        recorded = [ops_of(one, rank, 1 + seed % 3, runs=2) for rank, one in enumerate(both)]
        ranks = [Simulated(rank, recorded[rank], memory, one) for rank, one in enumerate(both)]
        while any(rank.at < len(rank.ops) for rank in ranks):
            order = ranks if chance.random() < 0.5 else ranks[::-1]
            assert any(rank.step() for rank in order)
            for rank, one in zip(ranks, both, strict=True):
                if rank.at == len(rank.ops):
                    other = ranks[1 - rank.rank]
                    has_read = not any(op[0] == "add" for op in other.ops[other.at :])
                    assert has_read or not one.is_read()
                    waited += not has_read
        assert all(one.is_read() for one in both)
    assert waited


def test_graphs_of_one_plan_follow_each_other(both: list[OneShot]) -> None:
    """Captured one after the other, launched in any order: each begins in the same place."""
    found = [ops_of(both[0], 0, sums, runs=1) for sums in (1, 3)]
    for ops in found:
        meets = [op for op in ops if op[0] == "meet"]
        assert len(meets) % 2 == 0
        assert meets[0] == next(op for op in found[0] if op[0] == "meet")


def test_who_waits_for_a_rank_that_is_gone_is_let_go(both: list[OneShot]) -> None:
    memory: dict[Any, Any] = {(1, 0): 5, (1, both[0].nbytes): 5}
    ops = [op for op in ops_of(both[0], 0, 5, runs=3) if op[0] != "check"]
    rank = Simulated(0, ops, memory, both[0])
    assert not both[1].is_void()
    rounds = itertools.count()
    while rank.at < len(ops):
        if not rank.step():
            both[0].release()
            assert next(rounds) < 100
    assert [one.is_void() for one in both] == [True, True], "also for a rank that lives, which has got such sums"
    both[0].close()
    both[0].release()  # nobody is there any more
    assert both[0].is_void(), "of what it was, others are still to be told"


# --- what it works on


def test_sums_of_other_sizes_and_dtypes_are_not_taken(both: list[OneShot]) -> None:
    for dtype, count, is_taken in (
        ("float32", 0, False),
        ("float32", 1, True),
        ("float32", NBYTES // 4, True),
        ("float32", NBYTES // 4 + 1, False),
        ("bfloat16", NBYTES // 2, True),
        ("uint8", 4, False),
        ("complex64", 4, False),
    ):
        assert (both[0].place(dtype, (count,)) is not None) == is_taken
    assert both[0].add_up(Tensor(NBYTES + 4)) is None
    assert stream == []


def test_memory_is_kept_for_the_next_one() -> None:
    """What frees a GPU's memory waits for all that runs there, which may wait for this process."""
    its = context(FakeGpu())
    first = OneShot(its, 0, NBYTES)
    address = first.offer()
    first.close()
    again, other = OneShot(its, 0, NBYTES // 2), OneShot(its, 0, NBYTES)
    assert again.offer() == address
    assert other.offer() != address
    driver: Any = its.driver
    driver.fails["ipc_export"], driver.times["ipc_export"] = error("cuIpcGetMemHandle", 1), 1
    before = dict(driver.mapped)
    with pytest.raises(Exception, match="cuIpcGetMemHandle"):
        OneShot(its, 0, NBYTES)
    assert driver.mapped == before


def test_what_the_gpu_works_with_is_not_closed(both: list[OneShot]) -> None:
    is_done = False
    retire(both[0], lambda: is_done)
    sweep()
    assert both[0]._page is not None
    is_done = True
    words = both[0]._page.cast("I")
    words[4 * 32] = 1  # this GPU has read all, the other one has not
    sweep()
    assert both[0]._page is not None
    words[5 * 32] = 1
    sweep()
    assert both[0]._page is None
    both[0].close()
    assert len(one_shot._idle) == 1
    driver: Any = both[0]._context.driver
    assert both[0]._theirs not in driver.mapped
    assert not driver.pinned


@pytest.mark.parametrize("offer", [None, ["GPU", 1 << 30, b"short"], ["GPU", 64, bytes(64)], ["GPU", "1", bytes(64)]])
def test_what_the_other_rank_says_is_checked(offer: Any) -> None:
    page = OneShot.new_page()
    try:
        with pytest.raises(ProtocolError, match="offers no memory"):
            OneShot(context(FakeGpu()), 0, NBYTES).join(offer, page)
    finally:
        os.close(page)


def test_memory_that_is_smaller_than_it_says_is_not_read() -> None:
    gpu = FakeGpu()
    small, large = OneShot(context(gpu), 0, NBYTES), OneShot(context(gpu), 1, 4 << 20)
    uuid, _, handle = small.offer()
    page = OneShot.new_page()
    with pytest.raises(ProtocolError, match="smaller than it says"):
        large.join([uuid, 16 << 20, handle], page)
    large.close()
    os.close(page)
    assert list(large._context.driver.mapped) == [large._memory.address]  # type: ignore[attr-defined]


# --- how two ranks come to it


class Graph:
    def replay(self) -> None:
        pass

    def destroy(self) -> None:
        pass


class Ranks:
    """Two groups' ends in one process, each in a thread."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = FakeGpu()
        self.memories: list[Any] = [SimpleNamespace(context=context(gpu), why_no_memops="") for _ in range(2)]
        self.groups = [Group(folder, "tp", rank, 2, None, 10.0, None) for rank in range(2)]
        self.nccl = [Nccl(folder, "tp", 1, rank, 0) for rank in range(2)]
        self.times, self.wrong = (5.0, 9.0), ""
        assert self._on_both(lambda rank: self.groups[rank]._form(10.0)) == [None, None]
        monkeypatch.setattr(one_shot_trial, "nccl_of", lambda group: self.nccl[group.rank])
        monkeypatch.setattr(one_shot_trial, "_wrong", lambda *_: self.wrong)
        monkeypatch.setattr(one_shot_trial, "_timed", lambda *_: (*self.times, ""))

    def driver(self, rank: int) -> Any:
        return self.memories[rank].context.driver

    def _on_both(self, work: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None, None]

        def run(rank: int) -> None:
            try:
                found[rank] = work(rank)
            except Exception as exc:
                found[rank] = exc

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def tried(self, *sums: Sum) -> list[Any]:
        return self._on_both(
            lambda rank: one_shot_trial.tried(self.groups[rank], self.memories[rank], list(sums or (SUM,)))
        )

    def are_whole(self) -> bool:
        """And nothing is left in their sockets, which this would meet."""
        told = self._on_both(lambda rank: exchange(self.groups[rank], f"rank {rank}"))
        return told == [{0: "rank 0", 1: "rank 1"}] * 2


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    made = Ranks(tmp_path, monkeypatch)
    yield made
    for group in made.groups:
        group.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_sums_are_one_shot_where_that_is_faster(ranks: Ranks) -> None:
    before = open_files()
    found = ranks.tried()
    assert [one.told for one in found] == ["each GPU reads the other's summands: 4 KiB took 5 us, NCCL 9"] * 2
    first, second = (one.one_shot for one in found)
    words = first._page.cast("I")
    words[5] = 77
    assert second._page.cast("I")[5] == 77
    assert open_files() == before
    assert ranks.are_whole()


def test_else_nccl_adds_up(ranks: Ranks) -> None:
    ranks.times = (10.0, 9.0)
    found = ranks.tried()
    told = "NCCL adds up: GPUs that read each other's summands: 4 KiB took 10 us, NCCL 9"
    assert [tuple(one) for one in found] == [(None, told)] * 2
    assert not ranks.driver(0).pinned
    assert ranks.are_whole()


def test_sums_that_are_wrong_are_never_taken(ranks: Ranks) -> None:
    ranks.wrong = "sums were wrong (rank 1)"
    assert [tuple(one) for one in ranks.tried()] == [(None, "NCCL adds up: sums were wrong (rank 1)")] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", ["allocate", "ipc_export", "ipc_open", "host_register"])
def test_a_gpu_that_cannot_leaves_all_to_nccl(ranks: Ranks, rank: int, call: str) -> None:
    driver = ranks.driver(rank)
    driver.fails[call], driver.times[call] = error(call, 217), 1
    before, open_before = [dict(ranks.driver(n).mapped) for n in range(2)], open_files()
    found = ranks.tried()
    assert [one.one_shot for one in found] == [None, None]
    assert [one.told for one in found] == [f"NCCL adds up: {call} returned 217 (rank {rank})"] * 2
    assert open_files() == open_before
    assert ranks.are_whole()
    for n, its in enumerate(before):
        kept = {memory.address for memory in one_shot._idle}
        assert its.keys() == ranks.driver(n).mapped.keys() - kept
        assert not ranks.driver(n).pinned
    assert all(one.one_shot is not None for one in ranks.tried())


def test_a_rank_that_goes_is_told(ranks: Ranks) -> None:
    ranks.groups[1].close()
    found = ranks._on_both(
        lambda rank: None if rank else one_shot_trial.tried(ranks.groups[0], ranks.memories[0], [SUM])
    )
    assert isinstance(found[0], GroupBroken)
    assert not ranks.driver(0).pinned


def test_streams_that_cannot_wait_for_words_leave_all_to_nccl(ranks: Ranks) -> None:
    ranks.memories[1].why_no_memops = "the driver has none"
    told = "NCCL adds up: streams cannot wait for words: the driver has none (rank 1)"
    assert [tuple(one) for one in ranks.tried()] == [(None, told)] * 2
    assert ranks.are_whole()


def test_the_largest_sum_that_can_be_is_tried(ranks: Ranks) -> None:
    first, second = ranks.tried(Sum("int8", (1 << 20,), True), SUM, Sum("float32", (4,), True))
    assert first.one_shot.nbytes == second.one_shot.nbytes == NBYTES
    assert ranks.tried(Sum("uint8", (8,), True), Sum("int8", (8,), False))[0].told == "NCCL adds up int8, uint8"


@pytest.fixture
def real_trial(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a library that has all it asks for."""
    monkeypatch.setattr(one_shot_trial, "_wrong", WRONG)
    monkeypatch.setattr(one_shot_trial, "_timed", TIMED)
    for name in ("arange", "device", "float32", "int32"):
        monkeypatch.setattr(Torch, name, mock.MagicMock(), raising=False)
    monkeypatch.setattr(Torch, "equal", staticmethod(lambda one, other: True), raising=False)
    monkeypatch.setattr(one_shot_trial, "launch", lambda group, work, is_counted: work())
    monkeypatch.setattr(Group, "synchronize", lambda _: None)


@pytest.mark.parametrize("step", ["zeros", "empty_like", "begin", "capture", "time_us"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_meets_in_a_trial_leaves_all_to_nccl(
    ranks: Ranks, rank: int, step: str, monkeypatch: pytest.MonkeyPatch, real_trial: None
) -> None:
    """Such as no memory for it, or a driver that refuses something in a capture. The group goes on."""
    me = threading.local()

    def fails(name: str, exc: Exception) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            if name == step and me.rank == rank:
                raise exc
            return (Graph(), None) if name == "capture" else 1.0 if name == "time_us" else mock.MagicMock()

        return call

    for name in ("zeros", "empty_like"):
        monkeypatch.setattr(Torch, name, staticmethod(fails(name, RuntimeError("CUDA out of memory"))), raising=False)
    refused = CudaError("no word", call="cuStreamBatchMemOp_v2", number=801, name="", sticky=False)
    library = SimpleNamespace(capture=fails("capture", refused))
    monkeypatch.setattr(Graph, "time_us", fails("time_us", RuntimeError("an illegal address")), raising=False)
    monkeypatch.setattr(OneShot, "begin", fails("begin", refused))
    monkeypatch.setitem(one_shot_trial.LIBRARIES, "torch", library)  # type: ignore[arg-type]

    def tried(number: int) -> Any:
        me.rank = number
        return one_shot_trial.tried(ranks.groups[number], ranks.memories[number], [SUM])

    what = {"capture": "no word", "begin": "no word", "time_us": "an illegal address"}.get(step, "CUDA out of memory")
    assert [tuple(one) for one in ranks._on_both(tried)] == [(None, f"NCCL adds up: {what} (rank {rank})")] * 2
    assert ranks.are_whole()
    assert not any(one._is_void() or one._one_shots for one in ranks.nccl), "later calls are none of the trial's"


WRONG, TIMED = one_shot_trial._wrong, one_shot_trial._timed
