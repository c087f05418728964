"""Which calls clients may launch, and what is believed of workers that hand kernels over: links, pages and proofs are
fakes, all else is the broker's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.simulation import DEVICES, GPU, GPU_CAPABILITIES
from tests.simulation.backends import passed_probe
from tests.unit.broker.driver import CLIENT, Driver

from layerzero.broker.core import events as ev
from layerzero.broker.core.leases import SETTLED_CALLS
from layerzero.broker.io.peers import Peer
from layerzero.broker.lifting import answers
from layerzero.broker.lifting import lifts as lifts_module
from layerzero.broker.lifting import store as store_module
from layerzero.broker.lifting.lifts import Lifts
from layerzero.broker.lifting.proofs import Proved
from layerzero.broker.lifting.store import LiftStore
from layerzero.broker.selection.certification import Certification
from layerzero.broker.selection.policy import Layer, Policy
from layerzero.broker.storage.perf_rows import Identity
from layerzero.ipc.errors import InvalidArgument, ProtocolError
from layerzero.ipc.lifting.form import Address, Kernel, Lifted, Patch, Span, digest
from layerzero.ipc.lifting.proof import Verdict
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.ipc.lifting.specimen import SEEDS, Specimen
from layerzero.ipc.shm import memory
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import messages, wire
from layerzero.ipc.transport.plain import pack_body, unpack_body
from layerzero.ipc.vocabulary.tensors import TensorSpec

CODE, TWIN, NEXT_CLIENT = b"machine code", "GPU-twin", b"next"
SPEC = TensorSpec.contiguous("float32", (4,))
KERNEL = Kernel(
    digest(CODE), "silu", (1, 1, 1), (8, 1, 1), 0, bytes(16), (Span(0, 8), Span(8, 8)),
    (Patch(0, Address("input", 0, 0)), Patch(8, Address("output", 0, 0))),
)  # fmt: skip
LIFTED = Lifted("silu", "alpha.silu", (SPEC,), (SPEC,), {}, (16, 16), (), (KERNEL,))
TRIALS = dict.fromkeys(SEEDS, ("aa",))


class Proofs:
    """Those that the test lets end."""

    def __init__(self) -> None:
        self.asked: dict[int, bytes] = {}
        self.found: list[Proved] = []

    def has(self, number: int) -> bool:
        return number in self.asked

    def start(self, number: int, gpu: str, data: bytes) -> None:
        assert number not in self.asked
        self.asked[number] = data

    def ended(self) -> Iterator[Proved]:
        while self.found:
            yield self.found.pop()

    def close(self) -> None:
        pass


class Rig:
    """Client 1, whose route 2 is settled on alpha's GPU; its calls are aligned to 16 bytes."""

    def __init__(self, folder: Path) -> None:
        both = {name: GPU_CAPABILITIES[name] for name in ("alpha", "beta")}
        twin = replace(DEVICES[GPU], device_uuid=TWIN)
        self.driver = Driver("alpha", "beta", changed=both, gpus=(DEVICES[GPU], twin), restart_budget=0)
        self.driver(ev.GpuOffered(CLIENT, GPU))
        self.driver.route(2, device=GPU)
        self.state = self.driver.state
        self.state.engine.set_certification(Certification({"alpha": passed_probe("alpha")}))
        self.driver(ev.ArenaOffered(CLIENT, 2, 128, GPU))
        refs = wire.pack_refs([wire.Ref(2, 0, 0, 64), wire.Ref(2, 0, 64, 64)])
        run = self.driver.serve(1, 2, point=TimelinePoint(0, 1), body=refs)
        self.driver.ran(run)
        self.told: list[Any] = []
        self.bumps, self.last = 0, set[int]()
        self.offers = {1: GPU, 2: TWIN}  # by client
        peer = Peer(None, "worker", backend="alpha", generation=1)  # type: ignore[arg-type]
        self.peer = peer
        links: Any = SimpleNamespace(
            tell=lambda backend, generation, message: self.told.append(message),
            get=lambda backend, generation: peer if (backend, generation) == ("alpha", peer.generation) else None,
        )
        pages: Any = SimpleNamespace(
            uuids=set,
            get=lambda client, gpu: (
                SimpleNamespace(page=SimpleNamespace(lift_epoch=1 + self.bumps)) if gpu == self.offers[client] else None
            ),
            bump_lift_epochs=self.bump,
            last_lifted=lambda client: self.last,
        )
        self.proofs = Proofs()
        self.store = LiftStore(folder)
        identities = {name: Identity(env_hash=name) for name in both}
        self.lifts = Lifts(self.state, identities, links, pages, self.store, lambda: None, self.driver)
        self.lifts._proofs = self.proofs  # type: ignore[assignment]
        route = self.state.clients[CLIENT].routes[2]
        route.settled, route.settled_on = SETTLED_CALLS, ("alpha.silu", self.state.workers["alpha"].generation)

    def bump(self) -> None:
        self.bumps += 1

    def ask(self, **params: Any) -> dict[str, Any]:
        return self.lifts.ask(CLIENT, {"route": 2, "alignments": [16, 16], **params})

    def asked(self) -> messages.Lift:
        """What the worker was told, after the client has asked."""
        assert self.ask() == {"state": "pending"}
        (message,) = self.told
        assert isinstance(message, messages.Lift)
        return message

    def say(self, number: int, data: bytes | None = None, *, peer: Peer | None = None, **more: Any) -> None:
        """A worker's answer."""
        fds = [] if data is None else [filled(data)]
        self.lifts.take(peer or self.peer, messages.Lifted(number=number, **more), fds)
        for fd in fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)

    def prove(self, number: int, verdict: Verdict = Verdict()) -> None:  # noqa: B008
        self.proofs.found.append(Proved(number, self.proofs.asked.pop(number), verdict))
        self.lifts.take_proved()


def filled(data: bytes) -> int:
    fd = memory.create_memfd("lifted", len(data))
    os.pwrite(fd, data, 0)
    return fd


def specimen(lifted: Lifted = LIFTED, trials: Any = TRIALS, codes: Any = None) -> bytes:
    return Specimen(lifted, {digest(CODE): CODE} if codes is None else codes, trials).pack()


def policy(isolation: str) -> Policy:
    return Policy.of(Layer("test", {"backend_isolation": isolation}))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "lifted")


def test_a_call_is_lifted_proved_kept_and_granted(rig: Rig) -> None:
    message = rig.asked()
    assert (message.alignments, message.seeds) == ([16, 16], list(SEEDS))
    rig.say(message.number, specimen())
    assert rig.ask() == {"state": "pending"}
    rig.prove(message.number)
    packed = LIFTED.pack()
    ready = {"state": "ready", "number": message.number, "backend": "alpha", "digest": digest(packed), "epoch": 1}
    assert rig.ask() == ready
    assert [entry.form for _, entry in rig.store.entries()] == [packed]
    assert rig.store.code(digest(CODE)) == CODE
    assert [row["state"] for row in rig.lifts.facts()] == ["lifted"]


def test_a_call_is_granted_on_each_gpu_of_a_kind(rig: Rig) -> None:
    """Lifted for one client, it serves another one's equal GPU, too; and leave on each ends by itself."""
    message = rig.asked()
    rig.say(message.number, specimen())
    rig.prove(message.number)
    assert rig.ask()["state"] == "ready"
    rig.driver.join(NEXT_CLIENT, 2)
    rig.driver(ev.GpuOffered(NEXT_CLIENT, TWIN))
    rig.driver.route(2, identity=NEXT_CLIENT, device=TWIN)
    route = rig.state.clients[NEXT_CLIENT].routes[2]
    route.settled, route.settled_on = SETTLED_CALLS, ("alpha.silu", rig.state.workers["alpha"].generation)
    answer = rig.lifts.ask(NEXT_CLIENT, {"route": 2, "alignments": [16, 16]})
    assert (answer["state"], answer.get("number")) == ("ready", message.number)
    known = next(iter(rig.lifts._known.values()))
    assert known.granted.keys() == {GPU, TWIN}


def ahead(rig: Rig, n: int, **more: Any) -> tuple[dict[str, Any], Lifted]:
    """What the client is told of the call that has n elements more, and what that is when it is lifted."""
    params = {"route": 2, "alignments": [16, 16], "grows": [[[1], [0]]] * 2, "first": n, "count": 1, **more}
    asking = rig.lifts.ask_ahead(CLIENT, params)
    while True:
        try:
            next(asking)
        except StopIteration as end:
            spec = TensorSpec.contiguous("float32", (4 + n,))
            return end.value["calls"][0], replace(LIFTED, inputs=(spec,), outputs=(spec,))


def test_a_neighbour_that_is_like_it_is_neither_tried_nor_sent_with_its_machine_code(rig: Rig) -> None:
    message = rig.asked()
    rig.say(message.number, specimen())
    rig.prove(message.number)
    said, neighbour = ahead(rig, 1)
    assert said == {"state": "pending"}
    assert rig.told[-1].seeds == []
    rig.say(rig.told[-1].number, specimen(neighbour, {}, {}))
    assert not rig.proofs.asked
    said, _ = ahead(rig, 1)
    assert (said["state"], said["digest"]) == ("ready", digest(neighbour.pack()))
    assert "form" not in said
    said, _ = ahead(rig, 1, forms=True)
    assert said["form"] == neighbour.pack()


@pytest.mark.parametrize("ends", ["well", "refused"])
def test_those_that_are_alike_wait_for_one_proof(rig: Rig, ends: str) -> None:
    """A library that has other kernels for lengths of some multiples: nothing like the next ones was proved."""
    message = rig.asked()
    rig.say(message.number, specimen())
    rig.prove(message.number)
    numbers, uneven = list[int](), replace(KERNEL, name="uneven")
    for n in range(1, 5):
        _, neighbour = ahead(rig, n)
        numbers.append(rig.told[-1].number)
        rig.say(numbers[-1], specimen(replace(neighbour, steps=(uneven,)), {}, {}))
    again = [one for one in rig.told if one.seeds == list(SEEDS)]
    assert [one.number for one in again] == [message.number, numbers[0]]
    _, neighbour = ahead(rig, 1)
    rig.say(numbers[0], specimen(replace(neighbour, steps=(uneven,))))
    rig.prove(numbers[0], Verdict() if ends == "well" else Verdict(LiftReason.PROOF_DIFFERS, "out"))
    state = "ready" if ends == "well" else "refused"
    assert [ahead(rig, n)[0]["state"] for n in range(1, 5)] == [state] * 4
    assert len(rig.told) == 6


def test_those_that_were_asked_for_before_anything_was_proved_wait_as_well(rig: Rig) -> None:
    """Their workers had run them for a proof; the first one's is enough, and what is not alike has its own."""
    routes, extents = (2, 3, 4), (4, 5, 6)
    settled = rig.state.clients[CLIENT].routes
    for route, extent in zip(routes[1:], extents[1:], strict=True):
        rig.driver.route(route, device=GPU, extent=extent)  # type: ignore[arg-type]
        settled[route].settled, settled[route].settled_on = settled[2].settled, settled[2].settled_on
    assert [rig.ask(route=route) for route in routes] == [{"state": "pending"}] * 3
    assert [message.seeds for message in rig.told] == [list(SEEDS)] * 3
    numbers = [message.number for message in rig.told]
    for number, extent, name in zip(numbers, extents, ("silu", "silu", "uneven"), strict=True):
        spec = TensorSpec.contiguous("float32", (extent,))
        steps = (replace(KERNEL, name=name),)
        rig.say(number, specimen(replace(LIFTED, inputs=(spec,), outputs=(spec,), steps=steps)))
    assert list(rig.proofs.asked) == [numbers[0], numbers[2]]
    rig.prove(numbers[0])
    assert [rig.ask(route=route)["state"] for route in routes] == ["ready", "ready", "pending"]
    rig.prove(numbers[2])
    assert rig.ask(route=4)["state"] == "ready"


@pytest.mark.parametrize("why", ["it is not alike", "the machine code is gone"])
def test_a_neighbour_that_is_not_is_lifted_and_tried_as_a_whole(rig: Rig, why: str) -> None:
    message = rig.asked()
    rig.say(message.number, specimen())
    rig.prove(message.number)
    _, neighbour = ahead(rig, 1)
    if why == "it is not alike":
        neighbour = replace(neighbour, steps=(replace(KERNEL, name="another"),))
    else:
        rig.store.code_path(digest(CODE)).unlink()
    rig.say(rig.told[-1].number, specimen(neighbour, {}, {}))
    number = rig.told[-1].number
    assert rig.told[-1].seeds == list(SEEDS)
    assert ahead(rig, 1)[0] == {"state": "pending"}
    rig.say(number, specimen(neighbour))
    if why == "it is not alike":
        rig.prove(number)
    assert ahead(rig, 1)[0]["state"] == "ready"
    assert rig.store.code(digest(CODE)) == CODE


# --- workers


def with_patch(**changes: Any) -> bytes:
    """A specimen whose only step is changed, as no program of ours would pack it."""
    value = unpack_body(specimen())
    form = unpack_body(value["lifted"])
    form["steps"][0].update(changes)
    return pack_body({**value, "lifted": pack_body(form)})


WRONG: dict[str, Callable[[], bytes]] = {
    "garbage": lambda: os.urandom(1000),
    "no map": lambda: pack_body({"specimen": 7}),
    "nothing in it": lambda: pack_body({"lifted": b"", "codes": [], "trials": {}}),
    "another kernel": lambda: specimen(replace(LIFTED, kernel_id="beta.silu")),
    "another op": lambda: specimen(replace(LIFTED, op="gelu", attrs={"approximate": "none"})),
    "other tensors": lambda: specimen(replace(LIFTED, inputs=(TensorSpec.contiguous("float32", (5,)),))),
    "another result": lambda: specimen(replace(LIFTED, outputs=(TensorSpec("float32", (4,), (2,)),))),
    "other arguments": lambda: specimen(replace(LIFTED, attrs={"approximate": "none"})),
    "other alignments": lambda: specimen(replace(LIFTED, alignments=(4, 16))),
    "one trial": lambda: specimen(trials={SEEDS[0]: ("aa",)}),
    "trials of its own": lambda: specimen(trials={5: ("aa",), 6: ("aa",)}),
    "numbers of a kernel that repeats": lambda: specimen(trials=dict.fromkeys(SEEDS, (bytes(16),))),
    "other code": lambda: specimen(codes={digest(b"x"): b"x"}),
    "code that was not tried": lambda: specimen(trials={}),
    "code that nobody needs": lambda: specimen(codes={digest(CODE): CODE, digest(b"x"): b"x"}),
    "an address behind the end": lambda: with_patch(patches=[[0, [0, 0, 17]]]),
    "an address before the start": lambda: with_patch(patches=[[0, [0, 0, -1]]]),
    "an address in the third input": lambda: with_patch(patches=[[0, [0, 2, 0]]]),
    "an address in scratch": lambda: with_patch(patches=[[0, [2, 0, 0]]]),
    "a patch behind the parameters": lambda: with_patch(patches=[[9, [0, 0, 0]]]),
    "padding behind the parameters": lambda: with_patch(padding=[[8, 9]]),
    "a grid of nothing": lambda: with_patch(grid=[0, 1, 1]),
    "much shared memory": lambda: with_patch(shared_bytes=1 << 40),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_worker_that_hands_over_what_is_none_is_to_be_ended(rig: Rig, wrong: str) -> None:
    """Whoever raises it closes the worker's connection (broker/connections.py). Nothing of it is kept or tried."""
    message = rig.asked()
    with pytest.raises(ProtocolError, match=r"alpha\.silu was lifted in a way that is none"):
        rig.say(message.number, WRONG[wrong]())
    assert rig.proofs.asked == {}
    assert list(rig.store.entries()) == []
    rig.told.clear()
    assert rig.asked().number == message.number  # of the next worker


def test_a_memfd_that_is_too_large_or_none_is_not_read(rig: Rig) -> None:
    """A sparse one costs its sender nothing."""

    def huge() -> int:
        fd = os.memfd_create("lifted", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 1 << 40)
        return fd

    def unsealed() -> int:
        fd = os.memfd_create("lifted")
        os.write(fd, specimen())
        return fd

    def pipe() -> int:
        ours, theirs = os.pipe()
        os.close(theirs)
        return ours

    for make in (huge, unsealed, pipe, lambda: os.open(__file__, os.O_RDONLY), lambda: os.memfd_create("empty")):
        number = rig.asked().number
        rig.told.clear()
        with pytest.raises(ProtocolError, match="in a way that is none"):
            rig.lifts.take(rig.peer, messages.Lifted(number=number), [make()])
    for count in (0, 2, 5):
        number = rig.asked().number
        rig.told.clear()
        fds = [filled(specimen()) for _ in range(count)]
        with pytest.raises(ProtocolError, match=f"carries one descriptor, got {count}"):
            rig.lifts.take(rig.peer, messages.Lifted(number=number), fds)
    assert rig.proofs.asked == {}


def test_numbers_that_nobody_asked_and_answers_that_come_twice_are_ignored(rig: Rig) -> None:
    number = rig.asked().number
    for other in (0, number + 1, 1 << 40, -1):
        rig.say(other, os.urandom(100))
        rig.say(other, reason="NO_SUCH_REASON")
    rig.say(number, specimen())
    rig.say(number, specimen())
    rig.say(number, os.urandom(100))
    rig.say(number, reason=LiftReason.NOT_DETERMINISTIC.value)
    rig.prove(number)
    rig.say(number, specimen())
    rig.say(number, reason=LiftReason.NOT_DETERMINISTIC.value)
    assert rig.ask()["state"] == "ready"
    assert rig.proofs.asked == {}


def test_an_answer_of_another_worker_is_ignored(rig: Rig) -> None:
    number = rig.asked().number
    for other in (replace(rig.peer, backend="beta"), replace(rig.peer, generation=2)):
        rig.say(number, specimen(), peer=other)
    assert rig.proofs.asked == {}
    assert rig.ask() == {"state": "pending"}


def test_a_reason_that_is_none_is_an_error_and_a_long_detail_is_cut(rig: Rig) -> None:
    number = rig.asked().number
    with pytest.raises(ProtocolError, match="which is none"):
        rig.say(number, reason="BECAUSE")
    rig.told.clear()
    rig.say(rig.asked().number, reason=LiftReason.CODE_UNKNOWN.value, detail="x" * 1_000_000)
    (row,) = rig.lifts.facts()
    assert (row["state"], row["reason"], len(row["detail"])) == ("refused", "CODE_UNKNOWN", 2000)


@pytest.mark.parametrize("reason", LiftReason)
def test_what_may_end_in_another_way_is_not_kept(rig: Rig, reason: LiftReason) -> None:
    rig.say(rig.asked().number, reason=reason.value, detail="so")
    assert rig.ask() == {"state": "refused", "reason": reason.value, "detail": "so"}
    assert len(list(rig.store.entries())) == (reason not in answers.PASSING)


def test_what_came_too_late_is_tried_again_after_a_while_and_not_for_ever(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may be to blame, or a kernel that hangs. Clients that were refused ask when leave may be given."""
    now_s = lifts_module.time.monotonic()
    monkeypatch.setattr(lifts_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    tries, waits = 0, []
    while not waits or waits[-1] < 10_000:
        rig.told.clear()
        rig.say(rig.asked().number, reason="PROOF_LATE")
        tries, waited_s, bumps = tries + 1, 0.0, rig.bumps
        while rig.bumps == bumps and waited_s < 10_000:
            assert rig.ask()["reason"] == "PROOF_LATE"
            waited_s += 5.0
            now_s += 5.0
            rig.lifts.look()
        waits.append(waited_s)
    assert (tries, waits[:-1]) == (5, [30.0, 60.0, 120.0, 240.0])


def test_a_worker_that_is_gone_or_silent_is_asked_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.asked()
    rig.lifts.look()
    assert rig.ask() == {"state": "pending"}
    rig.peer.generation += 1
    rig.lifts.look()
    assert [row["state"] for row in rig.lifts.facts()] == ["asked"]
    rig.peer.generation -= 1
    rig.told.clear()
    rig.asked()
    monkeypatch.setattr(lifts_module, "WORKER_S", 0.0)
    rig.lifts.look()
    assert [row["state"] for row in rig.lifts.facts()] == ["asked"]


# --- clients


@pytest.mark.parametrize("number", [None, 0, 999, "2", 2.0, [], {}, True])
def test_a_route_that_is_none_is_named(rig: Rig, number: Any) -> None:
    with pytest.raises(InvalidArgument, match="the number of a route of this client"):
        rig.ask(route=number)
    with pytest.raises(InvalidArgument, match="the number of a route of this client"):
        rig.lifts.ask(b"nobody", {"route": 2, "alignments": [16, 16]})


@pytest.mark.parametrize("alignments", [None, [], [16], [16] * 3, [16, 3], [16, 16.0], [16, []], [True, 16], "16"])
def test_alignments_that_are_none_are_named(rig: Rig, alignments: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"needs `alignments`, 2 of \[0, 1, 2, 4, 8, 16, 256\]"):
        rig.ask(alignments=alignments)
    assert rig.told == []


def test_a_self_registered_worker_lifts_nothing(rig: Rig) -> None:
    rig.state.workers["alpha"].is_joined = True
    assert rig.ask() == {
        "state": "refused",
        "reason": "NOT_ALLOWED",
        "detail": "the worker of alpha is self-registered",
    }


def lifted(rig: Rig) -> int:
    number = rig.asked().number
    rig.say(number, specimen())
    rig.prove(number)
    assert rig.ask()["state"] == "ready"
    return number


def test_a_worker_that_has_died_too_often_takes_no_leave_back(rig: Rig) -> None:
    lifted(rig)
    rig.driver.dies("alpha")
    assert rig.state.workers["alpha"].state.value == "disabled"
    rig.lifts.look()
    assert rig.bumps == 0
    assert rig.ask()["state"] == "ready"


def test_a_policy_that_changes_has_all_ask_again(rig: Rig) -> None:
    """Those that were refused, too: it may allow more than before."""
    rig.lifts.look()
    rig.state.engine.set_policy(policy("subprocess"))
    rig.lifts.look()
    bumps = rig.bumps
    assert rig.ask()["reason"] == "NOT_ALLOWED"
    rig.state.engine.set_policy(policy("lifted"))
    rig.lifts.look()
    assert rig.bumps == bumps + 1
    rig.lifts.look()
    assert rig.bumps == bumps + 1


def test_what_a_client_launched_last_is_suspect_when_it_ends_without_a_word(rig: Rig) -> None:
    rig.last = {lifted(rig), 999}
    rig.lifts.on_client_left(7)
    assert rig.ask()["reason"] == "FAULTED"
    assert [fault["kernel"] for fault in rig.store.faults()] == ["alpha.silu"]
    (suspicion,) = (rig.store.folder / "suspects").iterdir()
    os.utime(suspicion, (time.time() - store_module.SUSPECT_S,) * 2)
    assert rig.ask()["state"] == "ready"
    assert rig.store.faults() == []


def test_a_kernel_that_has_cost_a_client_its_gpu_is_refused_for_all_calls_until_it_is_forgiven(rig: Rig) -> None:
    number = lifted(rig)
    assert rig.lifts.note_fault(CLIENT, {"numbers": [number, 999]}) == {"kernels": ["alpha.silu"]}
    assert rig.bumps == 1
    for alignments in ([16, 16], [256, 256]):
        assert rig.ask(alignments=alignments)["reason"] == "FAULTED"
    assert rig.store.forgive() == 1
    assert rig.ask()["state"] == "ready"
