"""attn_implementation="layerzero_if_faster": attention is SDPA's for kinds of calls that were slower by ours."""

from __future__ import annotations

import torch
from tests.transformer_models import comparing
from tests.transformer_models.test_attention import LEFT, model
from torch import Tensor
from transformers import AttentionMaskInterface

import layerzero.transformers as lzt
from layerzero.torch.evidence import SAMPLES, SLOWER, TRYING, WARM
from layerzero.transformers import masks, running

NAME = "layerzero_if_faster"
TO_SDPA = "handed to SDPA: "


def same(found: Tensor, expected: Tensor) -> None:
    assert comparing.error(found, expected, LEFT["attention_mask"]) <= comparing.LARGEST_ERROR


def counts() -> dict[str, int]:
    return {row.outcome: row.calls for row in lzt.report().rows}


def settled(slower: str) -> None:
    """All kinds of attention that there are, as though the calls of one side had been slow."""
    for trial in running.evidence._trials.values():
        trial._settled = None
        trial._begin()
        while (turn := trial.turn()).name.startswith("TRY"):
            trial.add(turn, 2000 if turn.name.endswith(slower) else 1000)


def test_each_call_is_made_once_and_the_slower_way_is_left() -> None:
    one, calls = model("llama", NAME), WARM + 2 * SAMPLES
    expected = comparing.logits(model("llama", "eager"), LEFT)
    layers = 2
    for _ in range(calls // layers):
        same(comparing.logits(one, LEFT), expected)
    assert counts() == {"served": WARM + SAMPLES, f"{TO_SDPA}{TRYING}": SAMPLES}
    (found,) = lzt.report().comparisons
    assert found.our_us > 0 < found.native_us
    assert str(found) in str(lzt.report())

    for slower, outcome in (("OURS", f"{TO_SDPA}{SLOWER}"), ("NATIVE", "served")):
        settled(slower)
        before = counts().get(outcome, 0)
        same(comparing.logits(one, LEFT), expected)
        assert counts()[outcome] == before + layers
    lzt.clear()
    assert lzt.report().comparisons == ()


def test_generates_the_same_tokens() -> None:
    """Lengths that grow are of few kinds: the way is found within a text, and kept for the next one."""
    tokens = [comparing.tokens(model("llama", name), LEFT, max_new_tokens=16) for name in ("eager", NAME)]
    assert torch.equal(*tokens)
    assert lzt.report().served > 0


def test_what_sdpa_lacks_is_not_timed_beside_it() -> None:
    expected = comparing.logits(model("gemma2", "eager"), LEFT)
    same(comparing.logits(model("gemma2", NAME), LEFT), expected)
    assert set(counts()) == {"served"}
    assert AttentionMaskInterface()[NAME] is masks.mask


def test_compiled_calls_are_sdpas() -> None:
    """Nobody can time them."""
    one, nodes = model("llama", NAME), []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(one, fullgraph=True, backend=backend)
    expected = comparing.logits(model("llama", "eager"), LEFT)
    same(comparing.logits(compiled, {**LEFT, "use_cache": False}), expected)
    assert any("scaled_dot_product_attention" in target for target in nodes)
    assert not any("layerzero" in target for target in nodes)


def test_in_the_place_of_sdpa() -> None:
    one = model("llama", "sdpa")
    with lzt.instead_of_sdpa(if_faster=True):
        comparing.logits(one, LEFT)
        assert len(running.evidence._trials) == 1
    assert lzt.report().served == 2
