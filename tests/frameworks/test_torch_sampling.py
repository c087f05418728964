"""Sampling in programs that torch traces, and in plans: settings that are numbers, offsets that are tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.frameworks.torch_cases import random

import layerzero as lz
import layerzero.torch as lzt

assert lzt

FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sample": lambda x, offset: lz.sample(x, temperature=0.7, top_k=5, top_p=0.9, seed=3, offset=offset),
    "filter_logits": lambda x, offset: lz.filter_logits(x, temperature=0.7, top_k=5),
    "penalize_logits": lambda x, offset: lz.penalize_logits(x, offset.expand(x.shape[0], 2), repetition_penalty=1.5),
    "speculative_verify": lambda x, offset: lz.speculative_verify(
        x.softmax(-1), torch.arange(x.shape[0] - 1), seed=1, offset=offset
    )[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_traced_and_not_tokens_are_the_same(name: str) -> None:
    """One graph, of any number of rows."""
    torch.compiler.reset()
    compiled = torch.compile(FUNCTIONS[name], backend="eager", fullgraph=True, dynamic=True)
    for rows in (3, 5):
        x, offset = random(rows, 50), torch.tensor([rows])
        torch.testing.assert_close(compiled(x, offset), FUNCTIONS[name](x, offset))


def test_a_plan_draws_by_the_offset_that_it_is_given() -> None:
    """Settings that are numbers are the plan's; the offset of an earlier call must not be."""
    x, plan = random(3, 50), lz.plan(FUNCTIONS["sample"])
    found = [plan(x, torch.tensor([step])).tolist() for step in range(8)]
    assert found == [FUNCTIONS["sample"](x, torch.tensor([step])).tolist() for step in range(8)]
    assert len({tuple(tokens) for tokens in found}) > 4
