"""The property that all targets share, over values instead of bytes: hypothesis picks a real input and what to change
in it, and shrinks what fails to the fewest changes. Also where atheris has no build."""

from __future__ import annotations

import random
from importlib import import_module
from types import ModuleType

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.example_counts import examples
from tests.fuzz.__main__ import CORPUS, MAX_BYTES, targets
from tests.fuzz.budget import Checked
from tests.fuzz.source import Source, chunk

MODULES = {target: import_module(f"tests.fuzz.{target}") for target in targets()}


@st.composite
def inputs(draw: st.DrawFn, target: str) -> bytes:
    """One of the corpus, with up to six changes: of a value in it, of a byte, or of its length."""
    data = draw(st.sampled_from([path.read_bytes() for path in sorted((CORPUS / target).iterdir())]))
    for seed in draw(st.lists(st.integers(0, 2**32 - 1), max_size=6)):
        data = _change(MODULES[target], data, random.Random(seed))[:MAX_BYTES]
    return data


def _change(module: ModuleType, data: bytes, rng: random.Random) -> bytes:
    changed = module.mutate(data, rng) if hasattr(module, "mutate") and rng.random() < 0.8 else None
    if changed is not None:
        return bytes(changed)
    at = rng.randrange(len(data) + 1)
    match rng.randrange(3):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.choice((1, 8))) + data[at:]
    return data[:at] + rng.randbytes(1) + data[at + 1 :]


@pytest.mark.parametrize("target", targets())
def test_changed_input_is_handled(target: str) -> None:
    """It ends in the target's own errors, in time and in little memory."""
    checked = Checked(MODULES[target])

    @settings(
        max_examples=examples(60),
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),  # explaining traces every line, which takes longer than inputs may
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(target))
    def handles(data: bytes) -> None:
        checked(data)

    handles()


@pytest.mark.parametrize("nbytes", [0, 0xFFFF, 0x10000])
def test_a_chunk_is_read_back_as_far_as_its_length_goes(nbytes: int) -> None:
    """A text that a mutation repeats may be longer; that is no finding."""
    assert Source(chunk(b"x" * nbytes) + b"y").chunk() == b"x" * min(nbytes, 0xFFFF)
