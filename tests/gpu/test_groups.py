"""Groups whose ranks have a GPU each: every call by NCCL, of all ranks and from one to the other, disagreement, deaths
while a GPU waits for another, and plans and pipelines that go over two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.gpu_site import gpu_site
from tests.process.group_ranks import Rank, all_of, each_of, errors, form
from tests.process.harness import Site

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CALLS, POINTS = "tests.gpu.group_calls", "tests.gpu.point_calls"
BIG = 1 << 20


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = gpu_site(tmp_path_factory.mktemp("store"), "one", isolation="lifted")
    yield made.start()
    made.stop()


@pytest.fixture(scope="module")
def both(site: Site) -> Iterator[list[Rank]]:
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks) == [1, 1]
    yield ranks
    for rank in ranks:
        rank.close()


def on_all(ranks: list[Rank], function: str, *args: Any, **options: Any) -> list[Any]:
    return all_of(ranks, "on", f"{CALLS}:{function}", *args, **options)


@pytest.mark.parametrize("rows", [0, 1, 1000, 200_000])
def test_every_call_gives_torchs_result(both: list[Rank], rows: int) -> None:
    first, second = on_all(both, "check", rows)
    assert first == second
    assert "sum bfloat16" in first


def test_calls_that_nobody_waits_for_are_in_the_order_of_the_stream(both: list[Rank]) -> None:
    assert on_all(both, "stream_of_calls", 200) == [True, True]


def test_ranks_that_disagree_go_on(both: list[Rank]) -> None:
    for count, rank in enumerate(both, 3):
        rank.ask("on", f"{CALLS}:sum_of", count)
    assert [rank.told()["error"] for rank in both] == ["RANKS_DISAGREE"] * 2
    assert on_all(both, "sum_of", 2) == [[2.0, 2.0]] * 2


def test_a_plan_is_split_over_two_gpus(both: list[Rank]) -> None:
    assert on_all(both, "split") == [["FROZEN", 7, 2, "nccl"]] * 2


def test_a_split_plan_is_one_graph_on_each_gpu(both: list[Rank]) -> None:
    """What was lifted for one rank is lifted for the other's GPU, too."""
    for right, collectives, told in on_all(both, "split_and_lifted"):
        assert (right, collectives) == (40, ["float32[6, 64]"] * 2)
        assert re.search(r"summands: 1 KiB took \d+ us, NCCL \d+", told), told


@pytest.mark.parametrize("sums", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 1), ("float16", 4096), ("float32", 1000)])
def test_sums_of_a_graph_are_nccls_to_the_bit(both: list[Rank], dtype: str, rows: int, sums: int) -> None:
    (first, told), (second, other) = on_all(both, "sums_in_a_graph", dtype, rows, sums)
    assert first == second == 240
    assert "each GPU reads the other's summands" in told
    assert "each GPU reads the other's summands" in other


def test_two_ranks_on_one_gpu_are_refused(site: Site) -> None:
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks, "one") == [1, 1]
    told = all_of(ranks, "on", f"{CALLS}:sum_of", 3, on=0, name="one")
    assert [one["error"] for one in told] == ["INVALID_ARGUMENT"] * 2
    assert "give each rank of group 'one' a GPU of its own" in told[0]["message"]
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("wait", [True, False])
def test_a_rank_dies_while_another_gpu_waits_for_its(site: Site, wait: bool) -> None:
    """NCCL's kernel is aborted, the GPU goes on, and the group is formed again with a new rank."""
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks, "dies") == [1, 1]
    assert on_all(ranks, "sum_up", name="dies") == [2.0 * BIG] * 2
    ranks[1].ask("on", f"{CALLS}:die_behind_a_long_kernel", name="dies")
    ranks[0].ask("on", f"{CALLS}:call_the_dying", wait=wait, name="dies")
    reason, took_s, total = ranks[0].told()
    assert reason == "RANK_DIED"
    assert total == 2000.0
    assert took_s < 1, "the GPU has waited for the dead rank's kernel, or the caller for all of NCCL's abort"
    print(f"told after {took_s:.2f} s")
    ranks[1].close()
    ranks[1] = Rank(site)
    ranks[0].ask("reform", name="dies")
    ranks[1].ask("form", "dies", 1, 2)
    assert [rank.told() for rank in ranks] == [[2, [[0, 1], [1, -1]]], 2]
    assert on_all(ranks, "sum_of", 2, name="dies") == [[2.0, 2.0]] * 2
    for rank in ranks:
        rank.close()


# --- from one to the other


def points_of(ranks: list[Rank], function: str, *args: Any, **options: Any) -> list[Any]:
    return all_of(ranks, "on", f"{POINTS}:{function}", *args, **options)


def apart(ranks: list[Rank], *calls: tuple[Any, ...], name: str = "tp") -> list[Any]:
    return each_of(ranks, POINTS, *calls, name=name)


@pytest.mark.parametrize("rows", [0, 1, 1001, 1_000_000])
def test_arrays_of_every_dtype_go_from_rank_to_rank(both: list[Rank], rows: int) -> None:
    first, second = points_of(both, "pass_on", rows)
    assert first == second
    assert first[-1] == "bool"


def test_what_was_sent_may_be_written_over_on_the_same_stream(both: list[Rank]) -> None:
    assert points_of(both, "write_over", 200) == [True, True]


def test_calls_of_both_and_from_one_to_the_other_are_in_the_order_of_the_stream(both: list[Rank]) -> None:
    assert points_of(both, "mixed", 50) == [1.0, 2.0]


def test_a_first_call_in_inference_mode_writes_what_was_made_there(site: Site) -> None:
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks, "inference") == [1, 1]
    assert points_of(ranks, "in_inference_mode", name="inference") == [[10.0, 5.0], [10.0, 15.0]]
    for rank in ranks:
        rank.close()


def test_nccl_that_two_have_started_is_that_of_calls_of_all_ranks(site: Site) -> None:
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks, "begun") == [1, 1]
    assert points_of(ranks, "exchange", name="begun") == [float(BIG)] * 2
    assert on_all(ranks, "sum_up", name="begun") == [2.0 * BIG] * 2
    assert points_of(ranks, "exchange", name="begun") == [float(BIG)] * 2
    for rank in ranks:
        rank.close()


def test_arrays_that_do_not_meet_are_told_to_both_who_go_on(both: list[Rank]) -> None:
    for sent, received, text in (
        (("here", [4]), ("", [4], "numpy", "torch"), "sends float32[4] of a GPU, rank 1 receives float32[4]"),
        (("here", [4]), ("", [4], "", "numpy"), "rank 1 receives a NumPy array: pass kind='torch', or out"),
        (("numpy", [4]), ("", [4], "here", "torch"), "sends float32[4], rank 1 receives float32[4] of a GPU"),
        (("here", [4]), ("", [2, 2], "here", "torch"), "float32[4] of a GPU, rank 1 receives float32[2, 2] of a GPU"),
    ):
        told = apart(both, ("point", True, *sent), ("point", False, *received))
        assert errors(told) == ["RANKS_DISAGREE"] * 2, told
        assert all(text in one["message"] for one in told), told
    told = apart(both, ("send_what_ends_a_gradient",), ("point", False, "", [4]))
    assert errors(told) == ["INVALID_ARGUMENT", "RANKS_DISAGREE"]
    assert apart(both, ("point", True, "here", [4]), ("point", False, "", [4])) == [[], ["Tensor"]]
    assert apart(both, ("point", True, "numpy", [4]), ("point", False, "", [4], "", "numpy"))[0] == []


def test_two_ranks_of_one_gpu_do_not_send(site: Site) -> None:
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks, "one") == [1, 1]
    told = apart(ranks, ("point_on", True, 0), ("point_on", False, 0), name="one")
    assert errors(told) == ["INVALID_ARGUMENT"] * 2
    assert all("give each rank of group 'one' a GPU of its own" in one["message"] for one in told)
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize(("what", "wait"), [("gpu", True), ("gpu", False), ("its place", True)])
def test_a_rank_dies_while_the_other_receives(site: Site, what: str, wait: bool) -> None:
    """While its GPU waits for what was agreed on, or before; the group is formed again with a new rank."""
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks, "recv") == [1, 1]
    assert points_of(ranks, "exchange", name="recv") == [float(BIG)] * 2
    ranks[0].ask("on", f"{POINTS}:receive_from_the_dying", wait, name="recv")
    ranks[1].ask("on", f"{POINTS}:die_in", what, name="recv")
    reason, took_s, total = ranks[0].told()
    assert (reason, total) == ("RANK_DIED", 2000.0)
    assert took_s < 3, "the GPU has waited for the dead rank's kernel"
    print(f"told after {took_s:.2f} s")
    ranks[1].process.wait()
    ranks[1].close()
    ranks[1] = Rank(site)
    ranks[0].ask("reform", name="recv")
    ranks[1].ask("form", "recv", 1, 2)
    assert [rank.told() for rank in ranks] == [[2, [[0, 0], [1, -1]]], 2]
    assert points_of(ranks, "exchange", name="recv") == [float(BIG)] * 2
    for rank in ranks:
        rank.close()


# --- pipelines


@pytest.mark.parametrize("ops", ["torch", "lz"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 4), (4, 4)])
def test_a_pipeline_gives_what_one_gpu_does(both: list[Rank], stages: int, micro_batches: int, ops: str) -> None:
    """By calls one by one, by plans, and by the graphs that these become."""
    told = points_of(both, "flow", stages, micro_batches, ops, 40)
    assert [one[0] for one in told] == [True, True], told
    assert told[1][1] == f"rank 1 of 2: {stages} stages, here {', '.join(map(str, range(1, stages, 2)))}"


def test_a_pipelines_result_stays_where_it_was_made(both: list[Rank]) -> None:
    assert [one[0] for one in points_of(both, "flow", 2, 2, "torch", 3, shares=False)] == [False, True]


def test_a_pipeline_of_one_ranks_gpu_is_refused_before_anything_flows(both: list[Rank]) -> None:
    assert errors(points_of(both, "mismatched_flow")) == ["INVALID_ARGUMENT"] * 2
    assert [one[0] for one in points_of(both, "flow", 2, 2, "torch", 2)] == [True, True]


@pytest.mark.parametrize("of_the_cpu", [False, True])
def test_a_stage_that_gives_something_else_than_was_agreed_on_ends_the_run(site: Site, of_the_cpu: bool) -> None:
    """The other rank's GPU waits for what does not come, and is freed of that."""
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks, "uneven") == [1, 1]
    told = points_of(ranks, "uneven_flow", of_the_cpu, name="uneven")
    assert errors(told) == ["INVALID_ARGUMENT", "GROUP_BROKEN"], told
    assert told[0]["message"].startswith("let stage 0 ")
    assert (told[1]["facts"]["reason"], told[1]["facts"]["ranks"]) == ("FAILED", [0])
    assert [one[0] for one in all_of(ranks, "reform", name="uneven")] == [2, 2]
    assert points_of(ranks, "exchange", name="uneven") == [float(BIG)] * 2
    for rank in ranks:
        rank.close()


def test_a_rank_dies_in_its_stage_and_another_one_goes_on(site: Site) -> None:
    """In the third run, whose transfers nobody agrees on any more: the other GPU waits for it."""
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks, "flow") == [1, 1]
    ranks[0].ask("on", f"{POINTS}:flow_of_the_dying", 0, name="flow")
    ranks[1].ask("on", f"{POINTS}:flow_of_the_dying", 5, name="flow")
    told = ranks[0].told()
    assert (told["error"], told["facts"]["reason"]) == ("GROUP_BROKEN", "RANK_DIED"), told
    ranks[1].process.wait()
    ranks[1].close()
    ranks[1] = Rank(site)
    ranks[0].ask("reform", name="flow")
    ranks[1].ask("form", "flow", 1, 2)
    assert [rank.told() for rank in ranks][1] == 2
    assert [one[0] for one in points_of(ranks, "flow", 4, 2, "torch", 3, name="flow")] == [True, True]
    for rank in ranks:
        rank.close()


# --- at the end


def test_a_rank_dies_while_another_gpus_graph_waits_for_its(site: Site) -> None:
    """Its kernels end, it is destroyed, and the plan is made again with a new rank. The last test: what the rank
    launched as it died is suspect for as long as the others run."""
    ranks = [Rank(site) for _ in range(2)]
    assert form(ranks, "graph") == [1, 1]
    ranks[1].ask("on", f"{CALLS}:die_in_a_graph", name="graph")
    ranks[0].ask("on", f"{CALLS}:replay_beside_the_dying", name="graph")
    reason, took_s, total = ranks[0].told()
    assert (reason, total) == ("RANK_DIED", 2000.0)
    assert took_s < 1
    print(f"told after {took_s:.2f} s")
    ranks[1].close()
    ranks[1] = Rank(site)
    ranks[0].ask("reform", name="graph")
    ranks[1].ask("form", "graph", 1, 2)
    assert [rank.told() for rank in ranks][1] == 2
    assert on_all(ranks, "run_again", name="graph") == ["FROZEN"] * 2
    for rank in ranks:
        rank.close()


def test_a_rank_dies_in_a_flood_of_runs(tmp_path: Path) -> None:
    """Its memory is there for as long as the other GPU reads it."""
    site = gpu_site(tmp_path, "one", isolation="lifted")
    site.start()
    try:
        ranks = [Rank(site) for _ in range(2)]
        assert form(ranks, "flood") == [1, 1]
        ranks[1].ask("on", f"{CALLS}:die_in_a_flood", 300, name="flood")
        ranks[0].ask("on", f"{CALLS}:flood_beside_the_dying", name="flood")
        reason, took_s, total = ranks[0].told()
        assert (reason, total) == ("RANK_DIED", 2000.0)
        assert took_s < 1
        print(f"told after {took_s:.2f} s")
        for rank in ranks:
            rank.close()
    finally:
        site.stop()
