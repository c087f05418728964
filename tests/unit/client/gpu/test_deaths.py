"""client/gpu/deaths.py: which bytes of a failed call's arguments may be kept, and where arguments lie that are gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.client.arrays.recognition import Array
from layerzero.client.capsules.taking import Capsules
from layerzero.client.gpu import deaths
from layerzero.client.gpu.arrays import version_of
from layerzero.ipc.transport.wire import NO_ARENA, REF
from layerzero.ipc.vocabulary.tensors import TensorSpec

SPEC = TensorSpec.contiguous("float32", (4,))


def tensor(owner: Any, *, needs_copy: bool = False) -> Array:
    made = Array("torch", SPEC, 4096, owner, owner, device=0)
    made.needs_copy = needs_copy
    return made


def test_what_was_written_since_is_left_out_by_name() -> None:
    counted = SimpleNamespace(_version=3)
    given = deaths.Given((tensor(counted), None), (version_of(tensor(counted)), None), is_written=False)
    assert given.problem(("x", "weight")) == ""
    counted._version += 1
    assert given.problem(("x", "weight")) == "the program has written to x since the call"


def test_what_the_call_writes_itself_and_what_cannot_be_described_are_left_out() -> None:
    owner = SimpleNamespace(_version=1)
    assert "writes into its arguments" in deaths.Given((tensor(owner),), (1,), is_written=True).problem(("x",))
    assert "x has strides" in deaths.Given((tensor(owner, needs_copy=True),), (1,), is_written=False).problem(("x",))


def test_tensors_of_inference_mode_have_no_count() -> None:
    class Inference:
        @property
        def _version(self) -> int:
            raise RuntimeError("Inference tensors do not track version counter.")

    assert version_of(tensor(Inference())) is None


def test_arguments_that_are_gone_lie_as_they_were_lent() -> None:
    """Those of one arena by their offsets, so that overlaps are seen, others apart; of none that is known apart."""
    refs = REF.pack(7, 0, 512, 16) + REF.pack(NO_ARENA, 0, 0, 0) + REF.pack(7, 0, 520, 16) + REF.pack(8, 0, 512, 16)
    places, is_known = deaths._places(("a", "b", "c", "d"), (SPEC, None, SPEC, SPEC), refs)
    assert is_known
    assert places["c"][0] - places["a"][0] == 8
    assert abs(places["d"][0] - places["a"][0]) >= deaths.APART // 2
    assert places["a"][0] % 256 == 0
    apart, is_known = deaths._places(("a", "b"), (SPEC, SPEC), b"")
    assert not is_known
    assert apart["b"][0] - apart["a"][0] >= SPEC.span_bytes


class Call:
    """As deaths.py has one that was sent."""

    refs, has_out, not_held, op = b"", False, "", "silu"
    given: deaths.Given | None = None
    taken: tuple[Any, ...] = ()

    def __init__(self, *, is_done: bool = False) -> None:
        self.point = 1
        page = SimpleNamespace(is_done=lambda _: is_done)
        self.gpu = SimpleNamespace(order=SimpleNamespace(page=page))


class Holding:
    """The deaths of a connection, whose thread does not run: a test sweeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
        monkeypatch.setenv("LAYERZERO_CAPSULES", mode)
        self.link = SimpleNamespace(lost=None, read_nowait=lambda: None)
        none: Any = None
        self.deaths = deaths.Deaths(Capsules(none, none), self.link)  # type: ignore[arg-type]
        monkeypatch.setattr(self.deaths, "_put", lambda _: None)

    def call(self, nbytes: int, *, storage_bytes: int = 0, address: int = 0) -> Call:
        """Given and sent: of a view of a storage."""
        storage = SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: storage_bytes or nbytes)
        owner = SimpleNamespace(_version=0, untyped_storage=lambda: storage)
        array = Array("torch", TensorSpec.contiguous("uint8", (nbytes,)), address, owner, owner, device=0)
        made: Any = Call()
        self.deaths.give(made, b"", (array, None, array), None, is_direct=True)
        self.deaths.hold(made)
        return made  # type: ignore[no-any-return]


def test_more_than_a_capsule_may_have_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that is given twice counts once."""
    holding = Holding(monkeypatch, "small")
    assert holding.call(1 << 20).given is not None
    large = holding.call((1 << 20) + 1)
    assert large.given is None
    assert "1,048,577 bytes of arguments; LAYERZERO_CAPSULES=small keeps 1,048,576" in large.not_held
    view = holding.call(64, storage_bytes=deaths.MAX_HELD_BYTES + 1)
    assert view.given is None
    assert "views of 268,435,457 bytes" in view.not_held
    memory = holding.deaths._memory(large, (), ())  # type: ignore[arg-type]
    assert memory.left_out == f"its arguments are gone: {large.not_held}"


def test_the_oldest_are_let_go_of_first_and_the_newest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = Holding(monkeypatch, "full")
    calls = [holding.call(100 << 20, address=n << 30) for n in range(4)]
    assert [one.given is not None for one in calls] == [False, False, True, True]
    assert "for those of later calls" in calls[0].not_held
    newest = holding.call(1 << 30)
    assert newest.given is not None
    assert calls[3].given is None


def test_what_a_capsule_is_being_made_of_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = Holding(monkeypatch, "full")
    failed = holding.call(200 << 20)
    holding.deaths.note(failed)  # type: ignore[arg-type]
    holding.call(200 << 20)
    assert failed.given is not None


def test_nothing_is_held_once_the_broker_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """No point is done any more then."""
    holding = Holding(monkeypatch, "small")
    call = holding.call(64)
    holding.deaths.sweep()
    assert call.given is not None
    holding.link.lost = ConnectionError("lost")
    holding.deaths.sweep()
    assert call.given is None
    assert not holding.deaths._held
    assert "when the broker was lost" in call.not_held
