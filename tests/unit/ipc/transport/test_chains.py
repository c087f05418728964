"""ipc/transport/chains.py: what is packed comes back, and nothing else is taken for a chain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.shm.lane import MAX_CALL_BYTES, MAX_WORD_BYTES
from layerzero.ipc.transport import chains
from layerzero.ipc.transport.wire import Ref, unpack_refs

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
REFS = st.builds(Ref, U32, U32, U64, U64)
STEPS = st.builds(chains.ChainStep, U64, st.lists(REFS, max_size=6).map(tuple), st.binary(max_size=64))


@given(st.lists(STEPS, max_size=20))
def test_a_table_comes_back_as_it_was(steps: list[chains.ChainStep]) -> None:
    assert chains.unpack_table(chains.pack_table(steps)) == steps


@given(REFS, st.binary(min_size=16, max_size=16), st.lists(REFS, max_size=chains.MAX_VARIABLES))
def test_a_call_comes_back_as_it_was_and_fits_a_lane(table: Ref, digest: bytes, variables: list[Ref]) -> None:
    body = chains.pack_chain_call(table, digest, variables)
    assert chains.unpack_chain_call(body) == (table, digest, tuple(variables))
    assert len(body) <= MAX_CALL_BYTES


@given(st.binary(max_size=400))
def test_any_bytes_are_a_table_or_refused(table: bytes) -> None:
    """A client writes them."""
    try:
        steps = chains.unpack_table(table)
    except ProtocolError:
        return
    assert len(chains.pack_table(steps)) == len(table)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_call_or_refused(body: bytes) -> None:
    try:
        call = chains.unpack_chain_call(body)
    except ProtocolError:
        return
    assert chains.pack_chain_call(*call) == body


@given(st.lists(st.integers(0, 2**64 - 1), max_size=chains.MAX_STEPS))
def test_the_times_of_all_steps_fit_behind_a_calls_end(times: list[int]) -> None:
    said = chains.pack_times(times)
    assert len(said) <= MAX_WORD_BYTES
    assert list(chains.unpack_times(said)) == times


@given(REFS, st.lists(REFS, max_size=4))
def test_a_step_reaches_nothing_outside_of_its_variables(ref: Ref, variables: list[Ref]) -> None:
    """Flags say of which variable a reference is a part; with none it is one of its own."""
    step = chains.ChainStep(1, (ref,), b"tail")
    try:
        body = chains.resolve(step, variables)
    except ProtocolError:
        assert ref.flags
        return
    found = unpack_refs(body, 1)[0]
    assert body.endswith(b"tail")
    if not ref.flags:
        assert found == ref
        return
    home = variables[ref.flags - 1]
    assert (found.arena, found.flags, found.nbytes) == (home.arena, 0, ref.nbytes)
    assert home.offset <= found.offset
    assert found.offset + found.nbytes <= home.offset + home.nbytes


def test_a_reference_that_leaves_its_variable_is_refused() -> None:
    step = chains.ChainStep(1, (Ref(0, 1, 8, 8),))
    assert chains.resolve(step, [Ref(3, 0, 100, 16)])
    for variables in ([], [Ref(3, 0, 100, 15)]):
        with pytest.raises(ProtocolError):
            chains.resolve(step, variables)
