"""What was decided for the calls in use, as the dashboard asks for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.process.harness import Site

import layerzero as lz


def test_calls_in_use_with_what_would_change_their_kernel(new_site: Callable[..., Site]) -> None:
    """The newest first, as many as were asked for; a refused kernel with its reason; gone with their client."""
    site = new_site()
    session = site.start().connect()
    for size in (3, 4, 5):
        lz.silu(np.ones(size, np.float32))
    with lz.avoid("alpha"):
        lz.silu(np.ones(6, np.float32))
    found = session.ask("decisions")
    calls = [one["call"] for one in found["decisions"]]
    assert calls == [f"silu({size}:float32)" for size in (6, 5, 4, 3)]
    assert found["known"] == 4
    newest, *others = found["decisions"]
    assert [one["candidates"][0]["kernel_id"] for one in others] == ["alpha.silu"] * 3
    assert newest["candidates"][0]["kernel_id"] != "alpha.silu"
    refused = [one for one in others[0]["candidates"] if not one["accepted"]]
    assert all(one["reasons"] for one in refused)
    assert [one["call"] for one in session.ask("decisions", most=1)["decisions"]] == calls[:1]
    for most in (0, 65, True, "all"):
        with pytest.raises(lz.InvalidArgument, match="1 to 64"):
            session.ask("decisions", most=most)
    lz.disconnect()
    session = site.connect()
    assert session.ask("decisions") == {"decisions": [], "known": 0}
