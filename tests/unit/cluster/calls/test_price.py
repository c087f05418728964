"""What another node's kernel costs beside those of this node."""

from __future__ import annotations

import pytest

from layerzero.client.connection.report import Candidate
from layerzero.cluster.calls.price import is_cheaper, priced, way_of

WAY = way_of([0.0012, 0.0011, 0.05], [0.0032, 0.0031, 0.0033], 2 << 20)
KERNEL = Candidate("torch.linear", "torch", True, score=1000.0, measured_us=2000.0)


def test_the_way_is_the_median_of_what_was_measured() -> None:
    """One late answer says nothing about the way."""
    assert WAY.hops_us == pytest.approx(1200)
    assert WAY.bytes_per_s == pytest.approx((2 << 20) / 0.002)
    assert WAY.transfer_us(2 << 20) == pytest.approx(2000)


def test_a_price_has_the_way_both_arrays_and_the_kernel() -> None:
    """And its score compares with those here as its price does with their times."""
    found = priced(KERNEL, "abc", WAY, 2 << 20, here_us=10_400.0, here_score=1050.0)
    assert (found.kernel_id, found.backend) == ("abc/torch.linear", "abc/torch")
    assert found.measured_us == pytest.approx(1200 + 2000 + 2000)
    assert found.score == pytest.approx(1050.0 * 2)
    assert "1,200 us two hops" in found.notes[-1]


def test_what_was_never_measured_there_does_not_win() -> None:
    """It counts as fast as the best here, and the way comes on top."""
    unknown = Candidate("torch.linear", "torch", True, score=1000.0)
    found = priced(unknown, "abc", WAY, 100, here_us=50_000.0, here_score=1050.0)
    assert found.measured_us is not None
    assert not is_cheaper(found.measured_us, 50_000.0)
    assert "not measured there" in found.notes[-1]


@pytest.mark.parametrize(("price_us", "here_us", "wins"), [(799, 1000, True), (801, 1000, False), (1, None, False)])
def test_a_small_gain_is_not_worth_the_way(price_us: float, here_us: float | None, wins: bool) -> None:
    """Prices are of a moment ago, and other nodes have work of their own."""
    assert is_cheaper(price_us, here_us) is wins
