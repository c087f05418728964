"""What a client makes of a broker's grant to run calls in this process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from layerzero.client.session.local import Local
from layerzero.ipc.errors import ProtocolError, RunInProcess

GRANT = {
    "backend": "toy",
    "kernel_id": "toy.silu",
    "lease_s": 1.0,
    "copies_inputs": False,
    "copies_outputs": False,
}


@pytest.mark.parametrize(
    "wrong",
    [{"lease_s": math.nan}, {"lease_s": 0.0}, {"lease_s": -1.0}, {"lease_s": "soon"}, {"lease_s": None}],
)
def test_a_grant_that_is_for_no_time_is_none(wrong: dict[str, Any]) -> None:
    """NaN seconds would never end."""
    local = Local(None, None, lambda *_: pytest.fail("nothing is asked"))  # type: ignore[arg-type]
    error = RunInProcess("run it", **{**GRANT, **wrong})
    with pytest.raises(ProtocolError, match="not a grant"):
        local.take_grant(None, error, None)  # type: ignore[arg-type]
