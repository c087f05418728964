"""layerzero.rotary: frequencies of each scaling, pair by pair from the papers' formulas, and what makes no sense."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from layerzero import rotary
from layerzero.ipc.errors import InvalidArgument

BASE, DIM, TRAINED = 5e5, 64, 8192
LISTS = {"short_factor": [1.0 + i / 64 for i in range(32)], "long_factor": [2.0 + i for i in range(32)]}
TRAINED_ON = {"original_max_position_embeddings": TRAINED}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED_ON}
YARN = {"rope_type": "yarn", "factor": 16.0, **TRAINED_ON}
LONGROPE = {"rope_type": "longrope", **LISTS, **TRAINED_ON}


def plain(i: int, base: float = BASE, dim: int = DIM) -> float:
    return math.exp(-math.log(base) * 2 * i / dim)


def llama3(i: int) -> float:
    """Dubey et al. 2024, as Meta's apply_scaling has it, by wavelengths."""
    wavelength = 2 * math.pi / plain(i)
    if wavelength < TRAINED / 4:
        return plain(i)
    if wavelength > TRAINED:
        return plain(i) / 8
    smooth = (TRAINED / wavelength - 1) / 3
    return (1 - smooth) * plain(i) / 8 + smooth * plain(i)


def yarn(i: int, fast: float = 32, slow: float = 1) -> float:
    """Peng et al. 2023, 3.2, with the bounds of the ramp in pairs, cut to whole ones."""
    low, high = (
        cut(DIM * math.log(TRAINED / (turns * 2 * math.pi)) / (2 * math.log(BASE)))
        for cut, turns in ((math.floor, fast), (math.ceil, slow))
    )
    gamma = 1 - min(max((i - max(low, 0)) / (min(high, DIM - 1) - max(low, 0)), 0), 1)
    return (1 - gamma) * plain(i) / 16 + gamma * plain(i)


def dynamic(i: int, length: int) -> float:
    return plain(i, BASE * (4 * length / TRAINED - 3) ** (DIM / (DIM - 2)))


CASES: list[tuple[str, dict[str, Any], dict[str, Any], Callable[[int], float], float]] = [
    ("none", {}, {}, plain, 1.0),
    ("mrope", {"type": "mrope", "mrope_section": [8, 12, 12]}, {}, plain, 1.0),
    ("linear", {"type": "linear", "factor": 4}, {}, lambda i: plain(i) / 4, 1.0),
    ("dynamic, short", {"rope_type": "dynamic", "factor": 4.0}, {"seq_len": 100}, plain, 1.0),
    ("dynamic", {"rope_type": "dynamic", "factor": 4.0}, {"seq_len": 30000}, lambda i: dynamic(i, 30000), 1.0),
    ("llama3", LLAMA3, {}, llama3, 1.0),
    ("yarn", YARN, {}, yarn, 0.1 * math.log(16) + 1),
    ("yarn, betas", {**YARN, "beta_fast": 8, "beta_slow": 2}, {}, lambda i: yarn(i, 8, 2), 0.1 * math.log(16) + 1),
    ("yarn, mscale", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, {}, yarn, 1.194081 / 1.277259),
    ("yarn, by limits", {**YARN, "factor": None, "attention_factor": 1.5}, {}, yarn, 1.5),
    (
        "longrope",
        LONGROPE,
        {"seq_len": 9000},
        lambda i: plain(i) / (2 + i),
        math.sqrt(1 + math.log(16) / math.log(TRAINED)),
    ),
    ("longrope, short", {**LONGROPE, "factor": 1.0}, {"seq_len": TRAINED}, lambda i: plain(i) / (1 + i / 64), 1.0),
    (
        "proportional",
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        {},
        lambda i: plain(i) * (i < 8),
        1.0,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_each_scaling_is_its_papers_formula(case: tuple[Any, ...]) -> None:
    """In float64, to 1e-13 of each frequency."""
    name, parameters, given, formula, factor = case
    limit = TRAINED if name.startswith("dynamic") else 16 * TRAINED
    found = rotary.frequencies(DIM, parameters, theta=BASE, max_position_embeddings=limit, **given)
    np.testing.assert_allclose(found.inverse, [formula(i) for i in range(DIM // 2)], rtol=1e-13)
    assert found.attention_factor == pytest.approx(factor, rel=1e-6 if "mscale" in name else 1e-15)


def test_a_part_of_a_head_has_frequencies_of_its_own() -> None:
    """partial_rotary_factor counts elements; the exponents are of those that are rotated."""
    found = rotary.frequencies(80, {"rope_theta": 1e4, "partial_rotary_factor": 0.4})
    np.testing.assert_allclose(found.inverse, [plain(i, 1e4, 32) for i in range(16)], rtol=1e-13)


@pytest.mark.parametrize(
    ("head_dim", "parameters", "options", "says"),
    [
        (DIM, {"rope_type": "ntk"}, {}, "rope_type is 'ntk'; allowed: default, linear"),
        (DIM, {"rope_type": "linear"}, {}, "linear lacks 'factor'; allowed: all of factor; add it to parameters"),
        (DIM, {"rope_type": "linear", "factor": 0}, {}, "factor is 0; allowed: a finite number above 0"),
        (DIM, {"rope_type": "linear", "factor": 2, "beta_fast": 2}, {}, "linear has no 'beta_fast'; allowed: factor"),
        (DIM, {"full_attention": {"rope_type": "default"}}, {}, r"pass parameters\['full_attention'\]"),
        (DIM, {"rope_theta": 1e4}, {"theta": 1e5}, "theta is 100000.0 and rope_theta 10000.0"),
        (DIM, {"rope_type": "dynamic", "factor": 2.0}, {}, "dynamic lacks max_position_embeddings"),
        (2, {"rope_type": "dynamic", "factor": 2.0}, {"max_position_embeddings": 8}, "4 at least for dynamic"),
        (DIM, {**YARN, "truncate": 0}, {}, "truncate is 0; allowed: True or False"),
        (DIM, {**LONGROPE, "short_factor": [1.0], "factor": 2.0}, {}, "short_factor has 1 numbers; allowed: 32"),
        (DIM, {**LONGROPE, "long_factor": 3.0}, {}, "long_factor is 3.0; allowed: a list"),
        (DIM, {**LLAMA3, "low_freq_factor": 4.0}, {}, "low_freq_factor is 4.0 and high_freq_factor 4.0"),
        (0, {}, {}, "head_dim is 0; allowed: an integer from 2 on"),
        (9, {}, {}, "9 of 9 elements are rotated; allowed: an even number"),
        (DIM, {"partial_rotary_factor": 1.5}, {}, "96 of 64 elements"),
        (DIM, {}, {"seq_len": -1}, "seq_len is -1; allowed: an integer from 0 on"),
        (DIM, {}, {"theta": math.inf}, "theta is inf"),
    ],
)
def test_what_makes_no_sense_is_refused(head_dim: int, parameters: Any, options: Any, says: str) -> None:
    """A key that nobody reads would be a scaling that is silently not applied."""
    with pytest.raises(InvalidArgument, match=says):
        rotary.frequencies(head_dim, parameters, **options)
