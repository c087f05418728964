"""ipc/vocabulary/pools.py: names of workers of one environment."""

from __future__ import annotations

import pytest

from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary import pools


def test_members_lead_to_their_environment() -> None:
    names = pools.members("old.0a1b2c3d", 3)
    assert names == ("old.0a1b2c3d", "old.0a1b2c3d.2", "old.0a1b2c3d.3")
    assert {pools.environment_of(name) for name in names} == {"old.0a1b2c3d"}
    assert pools.named(pools.joined(names)) == names


@pytest.mark.parametrize("backend", ["torch", "torch.2", "onnxruntime-1.16", "old.0a1b2c3d.02", "old.0a1b2c3d.x", ""])
def test_others_are_their_own(backend: str) -> None:
    assert pools.environment_of(backend) == backend


@pytest.mark.parametrize("count", [0, 65, True, 1.0, None])
def test_counts_that_cannot_be_are_refused(count: object) -> None:
    with pytest.raises(InvalidArgument, match="allowed: an integer from 1 to 64"):
        pools.members("old.0a1b2c3d", count)  # type: ignore[arg-type]
