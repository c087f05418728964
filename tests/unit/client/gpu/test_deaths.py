"""client/gpu/deaths.py: which bytes of a failed call's arguments may be kept, and where arguments lie that are gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from layerzero.client.arrays.recognition import Array
from layerzero.client.gpu import deaths
from layerzero.ipc.transport.wire import NO_ARENA, REF
from layerzero.ipc.vocabulary.tensors import TensorSpec

SPEC = TensorSpec.contiguous("float32", (4,))


def tensor(owner: Any, *, needs_copy: bool = False) -> Array:
    made = Array("torch", SPEC, 4096, owner, owner, device=0)
    made.needs_copy = needs_copy
    return made


def test_what_was_written_since_is_left_out_by_name() -> None:
    counted = SimpleNamespace(_version=3)
    given = deaths.Given((tensor(counted), None), (deaths._version(tensor(counted)), None), is_written=False)
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

    assert deaths._version(tensor(Inference())) is None


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
