"""Sampling on a GPU: the tokens of the CPU, bit by bit, also in a replayed graph."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the kernels are torch's")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from layerzero.workers.provider import Call  # noqa: E402
from layerzero.workers.providers._torch_sampling import Sampling  # noqa: E402

VOCABULARY = 131_072
SETTINGS: dict[str, tuple[Any, Any, Any, Any]] = {
    "plain": (None, None, None, None),
    "temperature": (torch.tensor([0.7]), None, None, None),
    "top_k": (torch.tensor([0.7]), torch.tensor([50]), None, None),
    "top_p": (torch.tensor([0.7]), None, torch.tensor([0.9]), None),
    "min_p": (None, None, None, torch.tensor([0.01])),
    "all": (torch.tensor([1.3]), torch.tensor([5000]), torch.tensor([0.95]), torch.tensor([0.001])),
}


def on_both(op: str, inputs: list[Any], outs: list[Any]) -> tuple[list[Any], list[Any]]:
    """What comes out on the CPU, and on the GPU from a replayed graph that was captured on other numbers."""
    call = Call(op, "", (), (), {})
    Sampling(torch, is_gpu=False).builders()[op](inputs, call)(outs if len(outs) > 1 else outs[0])
    there: list[Any] = [None if one is None else one.cuda() for one in inputs]
    found = [one.cuda() for one in outs]
    run = Sampling(torch, is_gpu=True).builders()[op](there, call)
    targets = found if len(found) > 1 else found[0]
    first = there[0].clone()
    there[0].copy_(first.flip(-1))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(targets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(targets)
    there[0].copy_(first)
    graph.replay()
    torch.cuda.synchronize()
    return outs, [one.cpu() for one in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_sample_draws_the_tokens_of_the_cpu(name: str, dtype: Any) -> None:
    """Other code for the generator, other orders of sums, another exponential unit: the same tokens."""
    rows, generator = 64, torch.Generator().manual_seed(1)
    logits = (torch.randn(rows, VOCABULARY, generator=generator) * 3).to(dtype)
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    for seed, offset in ((seeds, torch.tensor([5])), (seeds[:1], seeds.flip(0))):
        out = torch.empty(rows, dtype=torch.long)
        (expected,), (found,) = on_both("sample", [logits, seed, offset, *SETTINGS[name]], [out])
        assert expected.unique().numel() > 20
        assert found.tolist() == expected.tolist()


def test_rows_have_settings_of_their_own() -> None:
    rows, generator = 32, torch.Generator().manual_seed(2)
    logits = torch.randn(rows, VOCABULARY, generator=generator) * 3
    temperature = torch.rand(rows, generator=generator) * 2
    temperature[::4] = 0.0
    top_k = torch.randint(0, 3000, (rows,), generator=generator)
    settings = [temperature, top_k, *(torch.rand(rows, generator=generator) * most for most in (1, 0.1))]
    seed = torch.tensor([-7])
    out = torch.empty(rows, dtype=torch.long)
    (expected,), (found,) = on_both("sample", [logits, seed, seed, *settings], [out])
    assert found.tolist() == expected.tolist()
    settings[0] = temperature + 0.5
    (expected,), (found,) = on_both("filter_logits", [logits, *settings], [torch.empty_like(logits)])
    assert torch.equal(found, expected)


def test_rows_that_nothing_can_be_drawn_from_are_marked() -> None:
    """Nobody waits for them here, so there is no error."""
    logits = torch.zeros(4, 100)
    logits[0, 5], logits[1, 6], logits[2] = torch.nan, torch.inf, -torch.inf
    out = torch.empty(4, dtype=torch.long, device="cuda")
    seed = torch.tensor([1], device="cuda")
    inputs = [logits.cuda(), seed, seed, None, None, None, None]
    Sampling(torch, is_gpu=True).builders()["sample"](inputs, Call("sample", "", (), (), {}))(out)
    assert out.tolist()[:3] == [-1, -1, -1]
    assert out[3] >= 0


@pytest.mark.parametrize("has_draft", [True, False])
def test_drafts_are_verified_as_on_the_cpu(has_draft: bool) -> None:
    rows, drafts, size, generator = 32, 5, 32_000, torch.Generator().manual_seed(3)
    target = torch.randn(rows, drafts + 1, size, generator=generator).mul(12).softmax(-1)
    draft = (target[:, :drafts] * 0.7 + target[:, :drafts].flip(0) * 0.3).contiguous()
    ids = torch.multinomial(draft.flatten(0, 1), 1, generator=generator).view(rows, drafts)
    ids[::7, 2] = -1
    seed = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    outs = [torch.empty(rows, drafts + 1, dtype=torch.long), torch.empty(rows, dtype=torch.long)]
    inputs = [target, ids, draft if has_draft else None, seed, torch.tensor([9])]
    expected, found = on_both("speculative_verify", inputs, outs)
    assert expected[1].unique().numel() > 2
    assert all(map(torch.equal, found, expected))


def test_trees_are_accepted_as_on_the_cpu() -> None:
    rows, nodes, generator = 64, 63, torch.Generator().manual_seed(4)
    drafts, wanted = (torch.randint(0, 2, (rows, nodes), generator=generator) for _ in range(2))
    parents = torch.arange(-1, nodes - 1).div(2, rounding_mode="floor").expand(rows, nodes).contiguous()
    outs = [torch.empty(rows, nodes, dtype=torch.long) for _ in range(2)] + [torch.empty(rows, dtype=torch.long)]
    expected, found = on_both("tree_accept", [drafts, parents, wanted], outs)
    assert expected[2].unique().numel() > 2
    assert all(map(torch.equal, found, expected))
