"""Offers of GPU memory: signed by workers that bytes reach, refused with the fault by the others."""

from __future__ import annotations

import os
from dataclasses import replace

import msgpack
import pytest
from tests.unit.ipc.fake_cuda import UUID, FakeDriver, FakeGpu, error

from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.handles import TRANSPORTS
from layerzero.ipc.cuda.mappings import Mappings
from layerzero.ipc.cuda.offer import SLOTS, Offer
from layerzero.ipc.cuda.offer_client import Trial
from layerzero.ipc.cuda.offer_worker import sign
from layerzero.ipc.errors import CudaError, NoTransport, ProtocolError

OTHER_PID = os.getpid() + 1


class Pair:
    """A client and a worker on one GPU; offers cross as bytes."""

    def __init__(self) -> None:
        gpu = FakeGpu()
        self.client, self.worker = FakeDriver(gpu), FakeDriver(gpu)
        self.mappings = Mappings(lambda uuid: Context(self.worker, uuid))

    def trial(self, transport: str = "ipc") -> Trial:
        return Trial(Context(self.client, UUID), "c1", 1, transport)

    def sign(self, trial: Trial, slot: int = 3, **changes: object) -> None:
        offer = Offer.from_wire(msgpack.unpackb(msgpack.packb(trial.offer.to_wire())))
        offer = replace(offer, **{"pid": OTHER_PID, **changes})  # type: ignore[arg-type]
        sign(self.mappings, offer, None if trial.fd is None else os.dup(trial.fd), slot)

    def close(self, trial: Trial) -> None:
        self.mappings.close()
        trial.close()
        assert [self.client.mapped, self.worker.mapped, self.client.pinned, self.worker.pinned] == [{}, {}, {}, {}]


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_worker_that_can_read_the_offer_leaves_its_sign(pair: Pair, transport: str) -> None:
    """The client needs no worker at hand to make an offer, and no answer but the sign."""
    trial = pair.trial(transport)
    assert not trial.is_signed(3)
    pair.sign(trial, 3)
    assert (trial.is_signed(3), trial.is_signed(4)) == (True, False)
    pair.close(trial)


# What fails on the worker's side, and on which transport.
@pytest.mark.parametrize(
    ("call", "number", "transport"),
    [("ipc_open", 201, "ipc"), ("vmm_import", 999, "vmm"), ("vmm_map", 1, "vmm"), ("host_register", 801, "staged")],
)
def test_worker_that_cannot_open_the_offer_says_why(pair: Pair, call: str, number: int, transport: str) -> None:
    """Each of these is a platform that exists; the reason is what its owner needs to know."""
    trial = pair.trial(transport)
    pair.worker.fails[call], pair.worker.times[call] = error(call, number), -1
    with pytest.raises(NoTransport, match=f"by '{transport}': {call} returned {number}") as caught:
        pair.sign(trial)
    assert caught.value.facts == {"transport": transport, "reason": f"{call} returned {number}"}
    assert not trial.is_signed(3)
    pair.close(trial)


def test_equal_pids_are_an_objection_to_handles_only(pair: Pair) -> None:
    """The driver takes the handle for one of the worker's own; two containers, each with a pid 1, do this."""
    trial = pair.trial("ipc")
    with pytest.raises(NoTransport, match=f"the same pid, {os.getpid()}"):
        pair.sign(trial, pid=os.getpid())
    assert pair.worker.calls["ipc_open"] == 0
    pair.close(trial)
    trial = pair.trial("vmm")
    pair.sign(trial, pid=os.getpid())
    pair.close(trial)


def test_worker_that_sees_other_memory_does_not_sign(pair: Pair) -> None:
    """A handle can open onto other memory without any error; what is not known must not be written to."""
    stranger = pair.client.gpu.make(2 << 20)
    object.__setattr__(pair.worker, "ipc_open", lambda handle: pair.worker._map(stranger))
    trial = pair.trial()
    with pytest.raises(NoTransport, match="the worker saw other bytes than the client wrote"):
        pair.sign(trial)
    assert not any(pair.client.gpu.memory[stranger])
    assert not trial.is_signed(3)
    pair.close(trial)


def test_slots_are_bounded(pair: Pair) -> None:
    """They come from another process."""
    trial = pair.trial()
    for slot in (-1, SLOTS):
        with pytest.raises(ProtocolError, match=f"slot {slot}; allowed"):
            trial.is_signed(slot)
    pair.sign(trial, SLOTS - 1)
    assert trial.is_signed(SLOTS - 1)
    pair.close(trial)


def test_sticky_error_is_not_taken_for_a_way_that_fails(pair: Pair) -> None:
    """That process can do nothing on the GPU any more."""
    trial = pair.trial()
    pair.worker.fails["synchronize_stream"] = error("cuStreamSynchronize", 700, sticky=True)
    pair.worker.times["synchronize_stream"] = -1
    with pytest.raises(CudaError, match="700"):
        pair.sign(trial)
    pair.worker.fails.clear()
    pair.close(trial)


@pytest.mark.parametrize("change", [{"pattern": b"short"}, {"pid": "1"}, {"handle": None}, {"handle": {}}])
def test_offer_that_cannot_be_true_is_refused(pair: Pair, change: dict[str, object]) -> None:
    """It comes from another process."""
    trial = pair.trial()
    with pytest.raises(ProtocolError):
        Offer.from_wire({**trial.offer.to_wire(), **change})
    pair.close(trial)
