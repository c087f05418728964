"""The ladder: the best way that carried real bytes both ways is taken, and each better one is named with its fault."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace

import msgpack
import pytest
from tests.unit.ipc.fake_cuda import UUID, FakeDriver, FakeGpu, error

from layerzero.ipc import cuda_pair
from layerzero.ipc.cuda import Context
from layerzero.ipc.cuda_handles import RUNGS
from layerzero.ipc.cuda_mappings import Mappings
from layerzero.ipc.cuda_pair import Answer, Choice, Offer, Trial
from layerzero.ipc.errors import CudaError, InvalidArgument, NoTransport, ProtocolError

OTHER_PID = os.getpid() + 1


class Pair:
    """A client and a worker on one GPU; offers and answers cross as bytes."""

    def __init__(self) -> None:
        gpu = FakeGpu()
        self.client, self.worker = FakeDriver(gpu), FakeDriver(gpu)
        self.mappings = Mappings(lambda uuid: Context(self.worker, uuid))
        self.client_pid = OTHER_PID
        self.spoil: Callable[[Offer, Answer], Answer] = lambda offer, answer: answer
        self.tried: list[str] = []

    def exchange(self, offer: Offer, fd: int | None) -> Answer:
        self.tried.append(offer.handle.rung)
        offer = Offer.from_wire(msgpack.unpackb(msgpack.packb(replace(offer, pid=self.client_pid).to_wire())))
        answer = cuda_pair.answer(self.mappings, offer, None if fd is None else os.dup(fd))
        return self.spoil(offer, Answer.from_wire(msgpack.unpackb(msgpack.packb(answer.to_wire()))))

    def choose(self, **options: object) -> Choice:
        return cuda_pair.choose(
            Context(self.client, UUID),
            "c1",
            itertools.count(1),
            self.exchange,
            **options,  # type: ignore[arg-type]
        )

    def is_clean(self) -> bool:
        return not (self.client.mapped or self.worker.mapped or self.client.pinned or self.worker.pinned)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_best_rung_is_tried_first_and_kept(pair: Pair) -> None:
    """The others cost copies."""
    assert pair.choose() == Choice("ipc", {})
    assert (pair.tried, pair.is_clean()) == (["ipc"], True)


# What fails, on which side -> the rung that is left.
@pytest.mark.parametrize(
    ("faults", "rung"),
    [
        ({("client", "ipc_export"): 1}, "vmm"),
        ({("worker", "ipc_open"): 201}, "vmm"),
        ({("worker", "ipc_open"): 201, ("client", "vmm_create"): 801}, "staged"),
        ({("worker", "ipc_open"): 201, ("worker", "vmm_import"): 999}, "staged"),
        ({("worker", "ipc_open"): 201, ("worker", "vmm_map"): 1, ("client", "host_register"): 801}, "copied"),
        ({("worker", "ipc_open"): 201, ("worker", "vmm_map"): 1, ("worker", "host_register"): 801}, "copied"),
    ],
    ids=str,
)
def test_next_rung_is_taken_where_one_fails(pair: Pair, faults: dict[tuple[str, str], int], rung: str) -> None:
    """Each of these is a platform that exists; the reasons are what its owner needs to know."""
    for (side, call), number in faults.items():
        driver = pair.client if side == "client" else pair.worker
        driver.fails[call], driver.times[call] = error(call, number), -1
    choice = pair.choose()
    assert choice.rung == rung
    assert list(choice.rejected) == list(RUNGS[: RUNGS.index(rung)])
    assert all("returned" in reason for reason in choice.rejected.values())
    assert pair.is_clean()


def test_equal_pids_skip_the_first_rung(pair: Pair) -> None:
    """The driver takes the handle for one of the worker's own; two containers, each with a pid 1, do this."""
    pair.client_pid = os.getpid()
    choice = pair.choose()
    assert choice.rung == "vmm"
    assert f"the same pid, {os.getpid()}" in choice.rejected["ipc"]
    assert pair.worker.calls["ipc_open"] == 0


def test_required_rung_is_the_only_one_tried(pair: Pair) -> None:
    """A user who asked for no copies must hear that there would be some, not get them."""
    assert pair.choose(required="vmm").rung == "vmm"
    pair.worker.fails["ipc_open"], pair.worker.times["ipc_open"] = error("cuIpcOpenMemHandle_v2", 201), -1
    with pytest.raises(NoTransport, match="'ipc' is required: ipc: cuIpcOpenMemHandle_v2 returned 201") as caught:
        pair.choose(required="ipc")
    assert caught.value.facts == {"required": "ipc", "reasons": {"ipc": "cuIpcOpenMemHandle_v2 returned 201"}}
    assert pair.tried == ["vmm", "ipc"]


def test_rung_that_nobody_knows_cannot_be_required(pair: Pair) -> None:
    """A misspelt setting must not mean "any"."""
    with pytest.raises(InvalidArgument, match="'icp'; known: ipc, vmm, staged, copied"):
        pair.choose(required="icp")


def test_nothing_works_is_an_error_with_all_reasons(pair: Pair) -> None:
    """Four reasons are four leads."""
    pair.spoil = lambda offer, answer: Answer(offer.handle.arena, error=f"no {offer.handle.rung} today")
    with pytest.raises(NoTransport, match=r"no ipc today; vmm: .*; staged: .*; copied: no copied today"):
        pair.choose()
    assert pair.is_clean()


def test_rung_that_is_not_offered_is_not_tried(pair: Pair) -> None:
    """Tests and users can take a way out."""
    assert pair.choose(offered=("staged", "copied")) == Choice("staged", {"ipc": "not offered", "vmm": "not offered"})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda o, a: replace(a, seen=bytes(512)), "the worker saw other bytes than the client wrote"),
        (lambda o, a: replace(a, written=bytes(256)), "the client saw other bytes than the worker wrote"),
        (lambda o, a: replace(a, arena=9), "the worker answered to arena 9; it was offered 1"),
        (lambda o, a: replace(a, written=b""), "the client saw other bytes than the worker wrote"),
        (
            lambda o, a: Answer(o.handle.arena, o.pattern * 2, o.pattern),
            "the client saw other bytes than the worker wrote",
        ),
    ],
)
def test_rung_that_carries_other_bytes_is_not_taken(
    pair: Pair, spoil: Callable[[Offer, Answer], Answer], reason: str
) -> None:
    """A handle can open onto other memory without any error."""
    honest = pair.spoil
    pair.spoil = lambda o, a: spoil(o, a) if o.handle.rung == "ipc" else honest(o, a)
    choice = pair.choose()
    assert (choice.rung, choice.rejected) == ("vmm", {"ipc": reason})


def test_worker_finds_out_when_it_sees_other_memory(pair: Pair) -> None:
    """It must not write into what it does not know."""
    stranger = pair.client.gpu.make(2 << 20)
    object.__setattr__(pair.worker, "ipc_open", lambda handle: pair.worker._map(stranger))
    choice = pair.choose()
    assert choice == Choice("vmm", {"ipc": "the worker saw other bytes than the client wrote"})
    assert not any(pair.client.gpu.memory[stranger])


def test_answer_that_does_not_come_costs_the_rung_and_keeps_the_memory(pair: Pair) -> None:
    """The worker may have it mapped: freeing it then is undefined."""

    def silent(offer: Offer, answer: Answer) -> Answer:
        if offer.handle.rung == "ipc":
            raise TimeoutError("2 s")
        return answer

    pair.spoil = silent
    assert pair.choose() == Choice("vmm", {"ipc": "no answer: 2 s"})
    assert len(pair.client.mapped) == 1


@pytest.mark.parametrize("side", ["client", "worker"])
def test_sticky_error_is_not_taken_for_a_rung_that_fails(pair: Pair, side: str) -> None:
    """That process can do nothing on the GPU any more."""
    driver = pair.client if side == "client" else pair.worker
    driver.fails["synchronize_stream"] = error("cuStreamSynchronize", 700, sticky=True)
    driver.times["synchronize_stream"] = -1
    with pytest.raises(CudaError, match="700"):
        pair.choose()


@pytest.mark.parametrize("change", [{"pattern": b"short"}, {"pid": "1"}, {"handle": None}, {"handle": {}}])
def test_offer_that_cannot_be_true_is_refused(pair: Pair, change: dict[str, object]) -> None:
    """It comes from another process."""
    seen: list[Offer] = []

    def keep(offer: Offer, answer: Answer) -> Answer:
        seen.append(offer)
        return answer

    pair.spoil = keep
    pair.choose()
    with pytest.raises(ProtocolError):
        Offer.from_wire({**seen[0].to_wire(), **change})
    with pytest.raises(ProtocolError):
        Answer.from_wire({"arena": 1, "seen": b"", "written": b""})


@pytest.mark.parametrize("rung", RUNGS)
def test_worker_that_can_read_the_offer_leaves_its_sign(pair: Pair, rung: str) -> None:
    """The client needs no worker at hand to make an offer, and no answer but the sign."""
    trial = Trial(Context(pair.client, UUID), "c1", 1, rung)
    offer = replace(Offer.from_wire(msgpack.unpackb(msgpack.packb(trial.offer.to_wire()))), pid=OTHER_PID)
    assert not trial.is_signed(3)
    cuda_pair.sign(pair.mappings, offer, None if trial.fd is None else os.dup(trial.fd), 3)
    assert (trial.is_signed(3), trial.is_signed(4)) == (True, False)
    pair.mappings.close()
    trial.close()
    assert pair.is_clean()


def test_worker_that_reads_other_bytes_does_not_sign(pair: Pair) -> None:
    """A handle can open onto other memory without any error."""
    trial = Trial(Context(pair.client, UUID), "c1", 1, "ipc")
    with pytest.raises(NoTransport, match="by 'ipc': the worker saw other bytes than the client wrote"):
        cuda_pair.sign(pair.mappings, replace(trial.offer, pattern=bytes(256), pid=OTHER_PID), None, 0)
    with pytest.raises(NoTransport, match="the same pid"):
        cuda_pair.sign(pair.mappings, trial.offer, None, 0)
    with pytest.raises(ProtocolError, match="slot -1; allowed"):
        trial.is_signed(-1)
    assert not trial.is_signed(0)
    pair.mappings.close()
    trial.close()
