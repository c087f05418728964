"""broker/selection/planner.py against a search of all plans."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Generator, Iterator

import pytest

from layerzero.broker.selection import planner
from layerzero.broker.selection.planner import Block, BlockPlan, Choice, Edge, Fusion, Node, Planner
from layerzero.ipc.errors import InvalidArgument

KERNELS = ("a", "b", "c")


def random_block(rng: random.Random) -> Block:
    """Up to six nodes, any edges, costs that tie now and then, a fusion where one is possible."""
    count = rng.randint(1, 6)
    nodes = tuple(
        Node(f"n{n}", tuple(Choice(k, float(rng.randint(0, 20))) for k in rng.sample(KERNELS, rng.randint(1, 3))))
        for n in range(count)
    )
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count) if rng.random() < 0.5]
    edges = tuple(
        Edge(
            i,
            j,
            {pair: float(rng.randint(0, 15)) for pair in itertools.product(KERNELS, KERNELS) if pair[0] != pair[1]},
        )
        for i, j in pairs
    )
    readers = {i: {b for a, b in pairs if a == i} for i in range(count)}
    fusions = []
    for start in range(count):
        chain = [start]
        while len(readers[chain[-1]]) == 1:
            chain += readers[chain[-1]]
            if rng.random() < 0.6:
                fusions.append(Fusion(tuple(chain), Choice(rng.choice([*KERNELS, "fused"]), float(rng.randint(0, 30)))))
    return Block(nodes, edges, tuple(fusions))


def every_plan(block: Block) -> Iterator[tuple[float, tuple[object, ...]]]:
    """Cost and units of each plan there is, by trying all."""
    singles = [[(c.kernel_id, c.us, (n,)) for c in node.choices] for n, node in enumerate(block.nodes)]
    for size in range(len(block.fusions) + 1):
        for fused in itertools.combinations(block.fusions, size):
            taken = [n for fusion in fused for n in fusion.nodes]
            if len(taken) != len(set(taken)):
                continue
            units = [(f.choice.kernel_id, f.choice.us, f.nodes) for f in fused]
            for rest in itertools.product(*(singles[n] for n in range(len(block.nodes)) if n not in taken)):
                plan = (*units, *rest)
                does = {n: unit for unit in plan for n in unit[2]}
                cost = sum(unit[1] for unit in plan)
                for edge in block.edges:
                    a, b = does[edge.source], does[edge.target]
                    if a is not b:
                        cost += edge.transform_us.get((a[0], b[0]), 0.0)
                yield cost, plan


def cost_of(block: Block, plan: BlockPlan) -> float:
    return sum(step.us for step in plan.steps) + sum(transform.us for transform in plan.transforms)


@pytest.mark.parametrize("seed", range(40))
def test_the_plan_is_the_cheapest_of_all(seed: int) -> None:
    """And the runner-up the second cheapest: dynamic programming must not lose any plan. 50 blocks a seed."""
    rng = random.Random(seed)
    for _ in range(50):
        block = random_block(rng)
        costs = sorted(cost for cost, _ in every_plan(block))
        found = planner.plan(block)
        assert found.is_exact
        assert found.cost_us == costs[0] == cost_of(block, found)
        assert found.runner_up_us == (costs[1] if len(costs) > 1 else None)
        assert sorted(n for step in found.steps for n in step.nodes) == list(range(len(block.nodes)))


def test_a_transform_can_make_the_slower_kernel_the_better_one() -> None:
    """The reason to plan jointly."""
    nodes = (Node("attention", (Choice("fast", 10.0), Choice("slow", 12.0))), Node("linear", (Choice("next", 5.0),)))
    alone = planner.plan(Block(nodes, (Edge(0, 1),)))
    together = planner.plan(Block(nodes, (Edge(0, 1, {("fast", "next"): 4.0}),)))
    assert [step.kernel_id for step in alone.steps] == ["fast", "next"]
    assert (together.steps[0].kernel_id, together.cost_us, together.runner_up_us) == ("slow", 17.0, 19.0)
    assert together.transforms == ()


def test_a_fusion_replaces_its_nodes_and_what_lies_between_them() -> None:
    """Its transforms inside are not paid; those to its neighbours are."""
    nodes = tuple(Node(f"n{n}", (Choice("k", 5.0),)) for n in range(3))
    edges = (Edge(0, 1, {("k", "k"): 1.0}), Edge(1, 2, {("k", "k"): 1.0, ("f", "k"): 2.0}))
    found = planner.plan(Block(nodes, edges, (Fusion((0, 1), Choice("f", 6.0)),)))
    assert [(step.kernel_id, step.nodes) for step in found.steps] == [("f", (0, 1)), ("k", (2,))]
    assert found.transforms == (planner.Transform(1, 2, 2.0),)
    assert found.cost_us == 13.0


def test_of_equal_plans_the_earlier_choices_win() -> None:
    """Choices come in the engine's order, which knows more than time."""
    nodes = tuple(Node(f"n{n}", (Choice("first", 5.0), Choice("second", 5.0))) for n in range(3))
    found = planner.plan(Block(nodes, (Edge(0, 1), Edge(1, 2))))
    assert {step.kernel_id for step in found.steps} == {"first"}


def test_a_block_that_is_too_wide_says_so() -> None:
    """Every result is read at the end only, so that no two ways meet: the answer is good, not proven best."""
    nodes = tuple(Node(f"n{n}", (Choice("a", 1.0), Choice("b", 2.0))) for n in range(12))
    edges = tuple(Edge(n, 11) for n in range(11))
    found = planner.plan(Block(nodes, edges), max_states=16)
    assert not found.is_exact
    assert found.cost_us == 12.0


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda n: Block((Node("silu", ()),)), "silu: no kernel"),
        (lambda n: Block((n, n), (Edge(1, 0),)), "edge 1 -> 0"),
        (lambda n: Block((n, n), (Edge(0, 2),)), "edge 0 -> 2"),
        (lambda n: Block((Node("x", (Choice("k", math.nan),)),)), "finite"),
        (lambda n: Block((n, n), (Edge(0, 1, {("k", "k"): -1.0}),)), "not negative"),
        (lambda n: Block((n, n, n), (Edge(0, 1), Edge(0, 2)), (Fusion((0, 1), Choice("f", 1.0)),)), "by the next one"),
        (lambda n: Block((n, n), (), (Fusion((0, 1), Choice("f", 1.0)),)), "by the next one"),
        (lambda n: Block((n,), (), (Fusion((0,), Choice("f", 1.0)),)), "by the next one"),
    ],
)
def test_what_is_no_block_is_refused(build: object, text: str) -> None:
    """A plan for it would be wrong without a word."""
    assert callable(build)
    with pytest.raises(InvalidArgument, match=text):
        build(Node("n", (Choice("k", 1.0),)))


def ended(steps: Generator[None, None, planner.BlockPlan]) -> planner.BlockPlan:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: planner.BlockPlan = end.value
            return found


def wide(count: int, choices: int) -> Block:
    """All nodes are read by the last one: as many states as there are combinations."""
    kernels = tuple(Choice(f"k{number}", 1.0 + number) for number in range(choices))
    edges = tuple(Edge(n, count - 1, {("k0", "k0"): 0.5}) for n in range(count - 1))
    return Block(tuple(Node(f"n{n}", kernels) for n in range(count)), edges)


@pytest.mark.parametrize(("count", "choices"), [(19, 20), (41, 20), (1024, 20)])
def test_work_of_one_search_is_bounded(count: int, choices: int) -> None:
    """18 calls into one were 14 s without an answer to anybody, and 40 more than anybody waited for."""
    block = wide(count, choices)
    steps = sum(1 for _ in planner.plan_in_steps(block))
    found = planner.plan(block)
    assert 10 < steps < planner.MAX_WORK // 500
    assert not found.is_exact
    assert sorted(node for step in found.steps for node in step.nodes) == list(range(count))
    assert found.cost_us <= count * 1.0 + 0.5 * (count - 1)  # not worse than the cheapest of each


def test_plans_of_the_last_blocks_are_remembered() -> None:
    """A model's layers ask the same again; the cache must not grow with the number of models."""
    cache = Planner(limit=2)
    blocks = [Block((Node("n", (Choice("k", us),)),)) for us in (1.0, 2.0, 3.0)]
    for block in (*blocks[:2], blocks[0], blocks[2]):
        assert ended(cache.plan(block)) == planner.plan(block)
    assert (cache.hits, cache.misses) == (1, 3)
    ended(cache.plan(blocks[0]))  # it was used last
    ended(cache.plan(blocks[1]))  # it was put out
    assert (cache.hits, cache.misses) == (2, 4)
