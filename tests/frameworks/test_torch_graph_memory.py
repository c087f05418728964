"""What plans on a GPU do with torch's memory, on tensors of the CPU: copies for graphs, and results of their own."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.client.plans.graph_library import TorchGraphs

torch = pytest.importorskip("torch")
ARRAYS = {
    "dense": lambda: torch.randn(3, 4),
    "turned": lambda: torch.randn(3, 4).T,
    "every second": lambda: torch.randn(8, 9)[1:6:2, 2:7],
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "a number": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "narrow": lambda: torch.randn(6, 2).bfloat16()[1:],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_copies_have_the_strides_of_their_tensors(name: str) -> None:
    """The guards of a plan hold for them, and for its results."""
    graphs, x = TorchGraphs(), ARRAYS[name]()
    static, other = graphs.static(x), graphs.static(x)
    graphs.filler([static])([x])
    graphs.filler([other, static])([x, x])
    (own,) = graphs.copier([x])()
    for made in (static, other, own):
        assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)
        assert torch.equal(made, x)
        assert not x.numel() or made.data_ptr() != x.data_ptr()


def test_results_that_share_memory_share_it_again() -> None:
    y, other = torch.randn(6, 5), torch.randn(4)
    whole, part, turned, alone = TorchGraphs().copier([y, y[1:3], y.T, other])()
    for made, given in ((whole, y), (part, y[1:3]), (turned, y.T), (alone, other)):
        assert torch.equal(made, given)
    assert part.data_ptr() == whole.data_ptr() + 5 * 4
    assert turned.data_ptr() == whole.data_ptr() != y.data_ptr()


@pytest.mark.parametrize("view", [lambda x: x[:, 2], lambda x: x[1:3].T, lambda x: x.reshape(-1)[3:]])
def test_a_view_of_a_copied_argument_is_one_of_the_callers(view: Any) -> None:
    whole = torch.randn(7, 5)
    graphs, x = TorchGraphs(), whole[1:]
    static = graphs.static(x)
    found = graphs.view(x, view(static), static)
    assert torch.equal(found, view(x))
    assert found.data_ptr() == view(x).data_ptr()
