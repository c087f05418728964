from __future__ import annotations

import pytest

from layerzero.ipc.names import MAX_LISTED, nearest, unknown_name

MANY = [f"kernel {n}" for n in range(MAX_LISTED + 1)]


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("trch", ["mlx", "torch"], "no backend is called 'trch'; did you mean 'torch'? Known: mlx, torch"),
        ("TORCH", ["mlx", "torch"], "no backend is called 'TORCH'; did you mean 'torch'? Known: mlx, torch"),
        ("xformers", ["mlx", "torch"], "no backend is called 'xformers'. Known: mlx, torch"),
        (
            "torch@2.4",
            ["mlx", "torch"],
            "build it first: lz env build torch@2.4; no backend is called 'torch@2.4'. Known: mlx, torch",
        ),
        (
            "torch@2.4",
            ["torch", "torch@2.4.1"],
            "build it first: lz env build torch@2.4, or take torch@2.4.1; no backend is called 'torch@2.4'. "
            "Known: torch, torch@2.4.1",
        ),
        ("torch@2*", ["torch"], "no backend is called 'torch@2*'; did you mean 'torch'? Known: torch"),
        ("torch@", ["torch"], "no backend is called 'torch@'; did you mean 'torch'? Known: torch"),
        ("torhc@2.4", ["torch"], "no backend is called 'torhc@2.4'; did you mean 'torch'? Known: torch"),
        ("torch", [], "no backend is called 'torch'. Known: none"),
        (None, ["torch"], "no backend is called None. Known: torch"),
        ("kernal 3", MANY, "no backend is called 'kernal 3'; did you mean 'kernel 3'?"),
        ("x", MANY, f"no backend is called 'x'. Known: {', '.join(MANY)}"),
    ],
)
def test_unknown_name_comes_with_the_nearest_and_the_known_ones(name: object, known: list[str], text: str) -> None:
    """Who has misspelt a name needs the right one; sixty beside it would hide it."""
    assert unknown_name("backend", name, known) == text


def test_only_what_has_versions_is_built() -> None:
    assert unknown_name("profile", "nlp@2", ["nlp"]) == "no profile is called 'nlp@2'; did you mean 'nlp'? Known: nlp"


def test_long_name_is_cut() -> None:
    """It may be what another process sent, and the search takes time with its length."""
    assert len(unknown_name("backend", "x" * 1_000_000, ["torch"])) < 200
    assert nearest("x" * 1_000_000, ["torch"]) == ""
