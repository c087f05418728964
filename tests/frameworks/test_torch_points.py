"""send, recv and pipelines of a GPU's tensors, with gloo in NCCL's place: what two processes agree on, and how it ends
where they do not. tests/gpu/test_groups.py has them on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.frameworks.soft_nccl import Site  # noqa: E402
from tests.process.group_ranks import Rank, all_of, each_of, errors, form  # noqa: E402

CALLS, SOFT = "tests.gpu.point_calls", "tests.frameworks.soft_nccl"
PROBED_S = 240  # the first call of an op waits for its environment's probes, a minute and a half where there were none


@pytest.fixture(scope="module")
def crew() -> Iterator[list[Rank]]:
    ranks = [Rank(Site()) for _ in range(2)]  # type: ignore[arg-type]
    yield ranks
    for rank in ranks:
        rank.close()


@pytest.fixture
def both(crew: list[Rank]) -> Iterator[list[Rank]]:
    for number, rank in enumerate(crew):
        if rank.process.poll() is not None:
            rank.close()
            crew[number] = Rank(Site())  # type: ignore[arg-type]
    assert form(crew, "points", timeout_s=PROBED_S) == [1, 1]
    assert all_of(crew, "on", f"{SOFT}:become", name="points") == [None, None]
    yield crew
    for rank in crew:
        if rank.process.poll() is None:
            rank.ask("close", name="points")
            rank.told()


def on_all(ranks: list[Rank], function: str, *args: Any, **options: Any) -> list[Any]:
    return all_of(ranks, "on", f"{CALLS}:{function}", *args, name="points", **options)


def apart(ranks: list[Rank], *calls: tuple[Any, ...]) -> list[Any]:
    return each_of(ranks, CALLS, *calls, name="points")


@pytest.mark.parametrize("rows", [0, 1, 5, 50_000])
def test_arrays_of_every_dtype_go_from_rank_to_rank(both: list[Rank], rows: int) -> None:
    first, second = on_all(both, "pass_on", rows)
    assert first == second
    assert first[-1] == "bool"


def test_calls_of_all_ranks_and_from_one_to_the_other_go_by_one_nccl(both: list[Rank]) -> None:
    """It was started for two of them, which is not done again when all agree on it."""
    assert on_all(both, "exchange") == [float(1 << 20)] * 2
    assert on_all(both, "mixed", 5) == [1.0, 2.0]
    assert on_all(both, "write_over", 3) == [True, True]


def test_what_a_group_that_was_killed_has_left_is_not_read(both: list[Rank]) -> None:
    """The next one has its name, and begins with generation 1 again."""
    folder = Path(os.environ["LAYERZERO_RUNTIME_DIR"]) / "groups"
    assert on_all(both, "exchange") == [float(1 << 20)] * 2
    left = {*folder.glob("points.*.nccl")}
    for rank in both:
        rank.process.kill()
        rank.process.wait()
        rank.close()
    both[:] = [Rank(Site()) for _ in both]  # type: ignore[arg-type]
    assert form(both, "points", timeout_s=PROBED_S) == [1, 1]
    assert all_of(both, "on", f"{SOFT}:become", name="points") == [None, None]
    assert on_all(both, "exchange") == [float(1 << 20)] * 2
    assert left < {*folder.glob("points.*.nccl")}, "torch's store of the one that was killed"


def test_calls_in_inference_mode_write_what_was_made_there(both: list[Rank]) -> None:
    assert on_all(both, "in_inference_mode") == [[10.0, 5.0], [10.0, 15.0]]


def test_arrays_that_do_not_meet_are_told_to_both_and_the_group_goes_on(both: list[Rank]) -> None:
    for sent, received, text in (
        (("here", [4]), ("", [4], "numpy", "torch"), "sends float32[4] of a GPU, rank 1 receives float32[4]"),
        (("here", [4]), ("", [4], "", "numpy"), "rank 1 receives a NumPy array: pass kind='torch', or out"),
        (("numpy", [4]), ("", [4], "here", "torch"), "sends float32[4], rank 1 receives float32[4] of a GPU"),
        (("here", [4]), ("", [2, 2], "here", "torch"), "float32[4] of a GPU, rank 1 receives float32[2, 2] of a GPU"),
    ):
        told = apart(both, ("point", True, *sent), ("point", False, *received))
        assert errors(told) == ["RANKS_DISAGREE"] * 2, told
        assert all(text in one["message"] for one in told), told
    for out, kind in (("", "torch"), ("here", "torch"), ("here", "numpy")):
        assert apart(both, ("point", True, "here", [4]), ("point", False, "", [4], out, kind)) == [
            [],
            ["Tensor"],
        ]
    assert apart(both, ("point", True, "numpy", [4]), ("point", False, "", [4], "", "numpy"))[1] != []
    assert apart(both, ("point", True, "here", [4]), ("point", True, "here", [4]))[0]["error"] == "RANKS_DISAGREE"


def test_what_cannot_be_sent_is_told_to_who_waits_for_it(both: list[Rank]) -> None:
    """Its own error there; the other need not wait until its time is over."""
    told = apart(both, ("send_what_ends_a_gradient",), ("point", False, "", [4]))
    assert errors(told) == ["INVALID_ARGUMENT", "RANKS_DISAGREE"]
    assert "rank 0 cannot send: x requires a gradient" in told[1]["message"]
    assert apart(both, ("point", True, "here", [4]), ("point", False, "", [4], "", "nothing")) != []
    assert apart(both, ("point", True, "here", [4]), ("point", False, "", [4])) == [[], ["Tensor"]]


def test_two_ranks_on_one_gpu_are_refused_on_both(both: list[Rank]) -> None:
    all_of(both, "on", f"{SOFT}:become", name="points", place="the only one")
    for given in (
        apart(both, ("point", True, "here", [4]), ("point", False, "", [4])),
        on_all(both, "flow", 2, 2, "torch", 1),
    ):
        assert errors(given) == ["INVALID_ARGUMENT"] * 2
        assert all("give each rank of group 'points' a GPU of its own" in one["message"] for one in given)
    all_of(both, "on", f"{SOFT}:become", name="points")
    assert on_all(both, "exchange") == [float(1 << 20)] * 2


def test_a_rank_that_turns_to_another_gpu_is_refused_there(both: list[Rank]) -> None:
    on_all(both, "exchange")
    both[0].ask("on", f"{SOFT}:become", name="points", device=5)
    both[0].told()
    told = apart(both, ("point", True, "here", [4]), ("point", False, "", [4]))
    assert errors(told) == ["INVALID_ARGUMENT", "RANKS_DISAGREE"]
    assert "x is on GPU 5: this rank's nccl runs on GPU 0" in told[0]["message"]


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_rank_dies_in_place_of_its_send(both: list[Rank], is_connected: bool) -> None:
    if is_connected:
        on_all(both, "exchange")
    both[0].ask("on", f"{CALLS}:receive_from_the_dying", True, name="points")
    both[1].ask("on", f"{CALLS}:die_in", "its place", name="points")
    reason, took_s, total = both[0].told()
    assert (reason, total) == ("RANK_DIED", 2000.0)
    assert took_s < 3
    both[1].process.wait()


def test_a_rank_dies_while_the_other_receives(both: list[Rank]) -> None:
    """Both have agreed: it waits in C++, for what never comes."""
    on_all(both, "exchange")
    both[0].ask("on", f"{CALLS}:receive_from_the_dying", True, name="points")
    both[1].ask("on", f"{CALLS}:die_when_it_was_accepted", name="points")
    reason, took_s, total = both[0].told()
    assert (reason, total) == ("RANK_DIED", 2000.0)
    assert took_s < 3
    both[1].process.wait()


# --- pipelines


@pytest.mark.parametrize("ops", ["torch", "lz"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 4), (4, 4)])
def test_a_pipeline_gives_what_one_process_does(both: list[Rank], stages: int, micro_batches: int, ops: str) -> None:
    told = on_all(both, "flow", stages, micro_batches, ops, 4)
    assert [one[0] for one in told] == [True, True]
    assert told[1][1] == f"rank 1 of 2: {stages} stages, here {', '.join(map(str, range(1, stages, 2)))}"


def test_a_result_stays_where_it_was_made(both: list[Rank]) -> None:
    assert [one[0] for one in on_all(both, "flow", 2, 2, "torch", 2, shares=False)] == [False, True]


@pytest.mark.parametrize(
    ("of_the_cpu", "text"),
    [
        (False, "let stage 0 give arrays of equal shapes each time: float32[1, 64], before float32[2, 64]"),
        (True, "let stage 0 return arrays of a GPU, as it takes them"),
    ],
)
def test_what_was_agreed_on_once_is_not_again(both: list[Rank], of_the_cpu: bool, text: str) -> None:
    """From the second run on transfers go without a message; a stage that gives something else ends the run."""
    told = on_all(both, "uneven_flow", of_the_cpu)
    assert errors(told) == ["INVALID_ARGUMENT", "GROUP_BROKEN"]
    assert told[0]["message"] == text
    assert (told[1]["facts"]["reason"], told[1]["facts"]["ranks"]) == ("FAILED", [0])
    all_of(both, "reform", name="points")
    assert [one[0] for one in on_all(both, "flow", 2, 2, "torch", 2)] == [True, True]


def test_arrays_of_a_gpu_on_one_rank_alone_are_refused_before_anything_flows(both: list[Rank]) -> None:
    assert errors(on_all(both, "mismatched_flow")) == ["INVALID_ARGUMENT"] * 2
    assert [one[0] for one in on_all(both, "flow", 2, 2, "torch", 2)] == [True, True]


def test_a_rank_dies_in_its_stage_and_another_one_goes_on(both: list[Rank]) -> None:
    """In the third run, whose transfers nobody agrees on any more."""
    both[0].ask("on", f"{CALLS}:flow_of_the_dying", 0, name="points")
    both[1].ask("on", f"{CALLS}:flow_of_the_dying", 6, name="points")
    told = both[0].told()
    assert (told["error"], told["facts"]["reason"]) == ("GROUP_BROKEN", "RANK_DIED")
    both[1].process.wait()
    both[1].close()
    both[1] = Rank(Site())  # type: ignore[arg-type]
    both[0].ask("reform", name="points")
    both[1].ask("form", "points", 1, 2)
    assert both[1].told() == 2
    assert both[0].told()[0] == 2
    all_of(both, "on", f"{SOFT}:become", name="points")
    assert [one[0] for one in on_all(both, "flow", 4, 2, "lz", 3)] == [True, True]
