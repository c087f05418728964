"""Groups of ranks: every call beside NumPy, disagreement on all ranks, and real deaths in the middle of calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.group_ranks import Rank, all_of, errors, form
from tests.process.harness import Site, wait_ended, wait_until
from tests.process.split_ranks import HIDDEN, INNER

import layerzero as lz

SIZE = 3
SPLIT = "tests.process.split_ranks"
BIG = [1 << 18]  # elements of float32: more than a message, and than a chunk of the smallest size


class Crew:
    """As many ranks as are asked for, the same processes for all tests; one that has died is replaced."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._ranks: list[Rank] = []

    def of(self, size: int) -> list[Rank]:
        self._ranks = [one for one in self._ranks if one.process.poll() is None]
        self._ranks += [Rank(self.site) for _ in range(size - len(self._ranks))]
        return self._ranks[:size]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


@pytest.fixture(scope="module")
def crew(store: Path) -> Iterator[Crew]:
    site = Site(store, group_kib=64)
    made = Crew(site.start())
    try:
        yield made
    finally:
        made.close()
        site.stop()


@pytest.fixture
def formed(crew: Crew) -> Iterator[Callable[..., list[Rank]]]:
    """Ranks that have formed the group "tp"; closed after the test, when nothing may be left of it."""
    groups: list[list[Rank]] = []

    def make(size: int = SIZE, **options: Any) -> list[Rank]:
        ranks = crew.of(size)
        assert form(ranks, **options) == [1] * size
        groups.append(ranks)
        return ranks

    yield make
    for ranks in groups:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.ask("close")
                rank.told()
    assert not list((crew.site.folder / "groups").iterdir())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_call_gives_numpys_result_and_all_ranks_the_same_bits(formed: Any, size: int) -> None:
    """Random shapes, dtypes, strides and addresses; by messages and in shared memory, whose chunks are small here."""
    digests = all_of(formed(size), "check", seed=size)
    assert isinstance(digests[0], str), digests[0]
    assert len(set(digests)) == 1


def test_a_call_that_need_not_be_waited_for_has_ended_on_the_cpu(formed: Any) -> None:
    """So that a program for GPUs runs here, too; by messages and in shared memory."""
    ranks = formed(2)
    for shape in ([4], BIG):
        for method in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
            waited, other = (all_of(ranks, "call", method, shape, wait=wait) for wait in (True, False))
            assert waited == other
        assert all_of(ranks, "synchronize") == [None, None]


def test_ranks_that_disagree_are_all_told_who_gave_what_and_go_on(formed: Any) -> None:
    """Another dtype, shape, op or way; and what one of them cannot call with at all."""
    ranks = formed()
    others: list[tuple[Any, str]] = [
        (("call", "all_reduce", [3]), "all_reduce(sum) of float32[3] by messages"),
        (("call", "all_reduce", [4], "int32"), "all_reduce(sum) of int32[4] by messages"),
        (("call", "all_gather", [4]), "all_gather of float32[4] by messages"),
    ]
    for (what, *args), text in others:
        for rank in ranks[:2]:
            rank.ask("call", "all_reduce", [4])
        ranks[2].ask(what, *args)
        told = [rank.told() for rank in ranks]
        assert errors(told) == ["RANKS_DISAGREE"] * 3
        first = "all_reduce(sum) of float32[4] by messages"
        assert [one["facts"]["given"] for one in told] == [{"0": first, "1": first, "2": text}] * 3
    for rank in ranks[:2]:
        rank.ask("call", "reduce_scatter", [3])
    ranks[2].ask("call", "reduce_scatter", [3], out=[2])
    told = [rank.told() for rank in ranks]
    assert errors(told) == ["RANKS_DISAGREE", "RANKS_DISAGREE", "INVALID_ARGUMENT"]
    assert told[0]["facts"]["given"]["2"].startswith("what it cannot call with: out is numpy float32 [2]")
    assert all_of(ranks, "call", "all_reduce", [2]) == [[6.0, 6.0]] * 3


def test_from_rank_to_rank(formed: Any) -> None:
    """Small and large ones; where the two do not fit both are told, and go on."""
    ranks = formed()
    for count in (0, 5, 1 << 18):
        ranks[0].ask("point", True, 2, count)
        ranks[2].ask("point", False, 0, count)
        assert [ranks[0].told(), ranks[2].told()] == [None, True]
    ranks[0].ask("point", True, 2, 5)
    ranks[2].ask("point", False, 0, 4, out=4)
    told = [ranks[0].told(), ranks[2].told()]
    assert errors(told) == ["RANKS_DISAGREE"] * 2
    assert "rank 0 sends int32[5], rank 2 receives int32[4]" in told[0]["message"]
    ranks[0].ask("point", True, 2, 5, "longdouble")
    ranks[2].ask("point", False, 0, 5)
    told = [ranks[0].told(), ranks[2].told()]
    assert errors(told) == ["INVALID_ARGUMENT", "RANKS_DISAGREE"]
    assert "rank 0 cannot send: " in told[1]["message"]
    for one, other in ((0, 1), (1, 0)):
        ranks[one].ask("point", True, other, 5)
    told = [ranks[0].told(), ranks[1].told()]
    assert errors(told) == ["RANKS_DISAGREE"] * 2
    assert all_of(ranks, "call", "all_reduce", [1]) == [[6.0]] * 3


def test_a_send_that_meets_a_call_of_all_ranks_hangs_nobody(formed: Any) -> None:
    """Neither can go on: all ranks are told so, and form the group again."""
    ranks = formed()
    ranks[0].ask("point", True, 1, 5)
    for rank in ranks[1:]:
        rank.ask("call", "all_reduce", [1])
    told = [rank.told() for rank in ranks]
    assert errors(told) == ["RANKS_DISAGREE"] * 3
    assert "rank 0 is in send(to=1), rank 1 is in " in told[2]["message"]
    assert [one[0] for one in all_of(ranks, "reform")] == [2] * 3


@pytest.mark.parametrize("how", ["waited for", "in a large call"])
def test_a_rank_is_killed_and_another_process_takes_its_place(formed: Any, crew: Crew, how: str) -> None:
    """All others know, by name, before their time is over; what each had completed is known afterwards."""
    ranks = formed()
    assert all_of(ranks, "call", "all_reduce", BIG) == [[6.0] * 8] * 3
    for rank in ranks[:2]:
        rank.ask("call", "all_reduce", [1 << 20])
    if how == "waited for":
        ranks[2].kill()
    else:
        ranks[2].ask("die_in_round", 5)
        ranks[2].process.wait()
        ranks[2].close()
    told = [rank.told() for rank in ranks[:2]]
    assert errors(told) == ["GROUP_BROKEN"] * 2
    for one in told:
        assert (one["facts"]["reason"], one["facts"]["ranks"]) == ("RANK_DIED", [2])
        assert one["message"].startswith("call group.reform() on all ranks: rank 2 has died")
    again = all_of(ranks[:2], "call", "all_reduce", [1])
    assert errors(again) == ["GROUP_BROKEN"] * 2
    ranks[2] = crew.of(3)[2]
    for rank in ranks[:2]:
        rank.ask("reform")
    ranks[2].ask("form", "tp", 2, 3)
    assert [rank.told() for rank in ranks] == [[2, [[0, 1], [1, 1], [2, -1]]]] * 2 + [2]
    assert all_of(ranks, "call", "all_reduce", BIG) == [[6.0] * 8] * 3


def test_a_rank_that_is_long_in_ending_is_known_as_dead_before_it_is_gone(formed: Any, crew: Crew) -> None:
    """A process that was killed gives its memory back before it closes its sockets: 0.3 s for each GB. Tried again
    where the machine was so slow that it was gone when the others came to look."""
    ranks = formed()
    for generation in range(2, 6):
        ranks[2].ask("hold", 3 << 29)
        ranks[2].told()
        for rank in ranks[:2]:
            rank.ask("call", "all_reduce", [1])
        ranks[2].process.kill()
        told = [rank.told() for rank in ranks[:2]]
        all_of(ranks[:2], "files")  # takes longer than what lies between the ends of its socket and of its pipe
        was_there = ranks[2].has_files()
        assert [(one["facts"]["reason"], one["facts"]["ranks"]) for one in told] == [("RANK_DIED", [2])] * 2
        ranks[2].kill()
        if was_there:
            return
        ranks[2] = crew.of(3)[2]
        for rank in ranks[:2]:
            rank.ask("reform")
        ranks[2].ask("form", "tp", 2, 3)
        assert [rank.told() for rank in ranks][2] == generation
    pytest.skip("the machine was so busy that the rank had closed its sockets each time before the others looked")


def test_fewer_ranks_go_on_where_nobody_comes_in_the_lost_ones_place(formed: Any) -> None:
    ranks = formed()
    ranks[1].kill()
    left = [ranks[0], ranks[2]]
    for number, rank in enumerate(left):
        rank.ask("reform", rank=number, size=2)
    assert [rank.told()[0] for rank in left] == [2, 2]
    assert all_of(left, "call", "all_reduce", [1]) == [[3.0]] * 2


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over(formed: Any) -> None:
    """It hears of that with its next call."""
    ranks = formed()
    told = all_of(ranks[:2], "call", "all_reduce", [1], timeout_s=0.1)
    assert errors(told) == ["GROUP_BROKEN"] * 2
    assert {one["facts"]["reason"] for one in told} == {"DEADLINE"}
    assert all(2 in one["facts"]["ranks"] for one in told)
    ranks[2].ask("call", "all_reduce", [1])
    late = ranks[2].told()
    assert (late["error"], late["facts"]["reason"]) == ("GROUP_BROKEN", "DEADLINE")


@pytest.mark.parametrize("how", ["close", "forget"])
def test_a_rank_that_ctrl_c_reaches_in_a_call_and_one_that_leaves_the_group(formed: Any, how: str) -> None:
    """By closing it, or as nobody has it any more."""
    ranks = formed()
    ranks[0].ask("interrupted")
    assert ranks[0].told()["error"] == "KeyboardInterrupt"
    told = all_of(ranks[1:], "call", "all_reduce", [1])
    assert [(one["facts"]["reason"], one["facts"]["ranks"]) for one in told] == [("INTERRUPTED", [0])] * 2
    all_of(ranks, "reform")
    ranks[1].ask(how)
    ranks[1].told()
    for rank in (ranks[0], ranks[2]):
        rank.ask("call", "all_reduce", [1])
    told = [ranks[0].told(), ranks[2].told()]
    assert [(one["facts"]["reason"], one["facts"]["ranks"]) for one in told] == [("RANK_LEFT", [1])] * 2
    ranks[1].ask("form", "tp", 1, 3)
    for rank in (ranks[0], ranks[2]):
        rank.ask("reform")
    assert [ranks[1].told(), ranks[0].told()[0], ranks[2].told()[0]] == [3, 3, 3]


def test_the_brokers_death_does_not_touch_shared_memory(crew: Crew, formed: Any) -> None:
    """It is not on the way of such calls, nor is it needed to form the group again."""
    ranks = formed(2)
    pid = crew.site.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert all_of(ranks, "call", "all_reduce", BIG) == [[3.0] * 8] * 2
    assert [one[0] for one in all_of(ranks, "reform")] == [2, 2]
    wait_ended(pid)
    crew.site.start()


@pytest.fixture
def three(crew: Crew) -> list[Rank]:
    """They run before a test looks at what it leaves."""
    return crew.of(3)


def test_who_is_missing_is_named_and_who_does_not_fit_refused(three: list[Rank], crew: Crew, no_leaks: None) -> None:
    """In a meeting whose host leaves first, too."""
    ranks = three
    said = "start the missing ranks, and call again: ranks 1, 2 of 4 did not come within timeout_s"
    for timeout_s in (0.2, 4, 40):  # on a busy machine the one may be gone when the other comes
        ranks[0].ask("form", "other", 0, 4, timeout_s=timeout_s)
        ranks[1].ask("form", "other", 3, 4, timeout_s=timeout_s)
        told = [ranks[0].told(), ranks[1].told()]
        assert errors(told) == ["GROUP_BROKEN"] * 2
        assert {one["facts"]["reason"] for one in told} == {"INCOMPLETE"}
        if is_told := any(one["message"].startswith(said) for one in told):  # whoever was there longer
            break
    assert is_told, told
    ranks[0].ask("form", "other", 0, 3, timeout_s=120)
    wait_until((crew.site.folder / "groups" / "other.sock").exists)
    ranks[1].ask("form", "other", 0, 3)
    assert f"is there already, as pid {ranks[0].process.pid}" in ranks[1].told()["message"]
    ranks[1].ask("form", "other", 1, 2)
    assert "size must be the same" in ranks[1].told()["message"]
    ranks[1].ask("form", "other", 1, 3)
    ranks[0].kill()  # the host
    ranks[2].ask("form", "other", 2, 3)
    ranks[0] = Rank(crew.site)
    ranks[0].ask("form", "other", 0, 3)
    assert [rank.told() for rank in ranks] == [1, 1, 1]
    assert all_of(ranks, "call", "all_reduce", [1], name="other") == [[6.0]] * 3
    all_of(ranks, "close", "other")
    ranks[0].close()


def test_nothing_is_left_and_a_forked_child_is_no_rank(formed: Any) -> None:
    ranks = formed(2)
    ranks[0].ask("fork")
    assert ranks[0].told() == 7
    assert all_of(ranks, "call", "all_reduce", [1]) == [[3.0]] * 2
    before = all_of(ranks, "files")
    for _ in range(3):
        all_of(ranks, "reform")
    assert all_of(ranks, "files") == before


def test_reports_say_which_way_and_why_not_the_others(formed: Any) -> None:
    ranks = formed(2)
    all_of(ranks, "call", "all_reduce", [4])
    report = all_of(ranks, "report")[1]
    assert (report["path"], report["call"]) == ("messages", 1)
    all_of(ranks, "call", "all_reduce", BIG)
    report = all_of(ranks, "report")[0]
    assert report["path"] == "shared memory"
    assert report["copied"] == 3 * (1 << 20) // 2  # half in, the own half and the other half out
    assert "not gloo: not measured; group.tune() does it" in report["text"]
    ranks[0].ask("explain", 1 << 20, op="all_to_all", backend="gloo")
    assert ranks[0].told().startswith("all_to_all of 1,048,576 bytes: gloo, asked for by backend=")
    told = all_of(ranks, "call", "all_reduce", [4], "uint16", backend="gloo")
    assert told[0]["message"] == "gloo adds up no uint16; leave backend= out"


def test_a_group_of_gpus_meets_and_agrees_on_the_cpu(formed: Any) -> None:
    """backend="nccl" is of arrays: words of ranks, and of split plans, are none."""
    ranks = connected(formed, backend="nccl")
    assert errors(all_of(ranks, "call", "all_reduce", [4])) == ["INVALID_ARGUMENT"] * 2
    assert all_of(ranks, "meet") == [None] * 2
    told = on(ranks, "refuse", "summed")
    assert all(one.startswith("leave cumsum at split_ranks.py:") for one in told), told


def test_what_no_group_can_be_is_refused_before_anybody_waits(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    crew.site.connect()
    try:
        for args in (("a/b", 0, 1), ("a", 1, 1), ("a", 0, 65), ("a", "0", 2)):
            with pytest.raises(lz.InvalidArgument, match="allowed"):
                lz.group(*args)
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        with pytest.raises(lz.InvalidArgument, match="set WORLD_SIZE, as torchrun does"):
            lz.group("a", 0)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        with lz.group("a") as group:
            assert (group.rank, group.size, group.all_reduce(np.ones(()))) == (0, 1, 1.0)
            assert group.last_report().path == "here"
    finally:
        lz.disconnect()


# --- plans split over ranks


def on(ranks: list[Rank], what: str, *args: Any) -> list[Any]:
    """What a function of tests/process/split_ranks.py gives on each rank."""
    return all_of(ranks, "on", f"{SPLIT}:{what}", *args)


def connected(formed: Any, **options: Any) -> list[Rank]:
    """Two ranks: they call, and another test may have killed their broker."""
    ranks: list[Rank] = formed(2, **options)
    assert all_of(ranks, "connect") == [True] * 2
    return ranks


def test_a_plan_is_split_and_gives_on_all_ranks_what_it_gives_whole(formed: Any) -> None:
    """For other numbers each time, and other shapes; what lies between the sums are plans."""
    ranks = connected(formed)
    assert on(ranks, "agree", [0]) == ["WARM"] * 2
    assert on(ranks, "agree", [1, 2, 3]) == ["FROZEN"] * 2
    assert on(ranks, "agree", [4, 5, 6, 7], 5) == ["FROZEN"] * 2
    assert on(ranks, "agree", list(range(8))) == ["FROZEN"] * 2
    text = on(ranks, "explain")[1]
    assert text.startswith("FROZEN: float64[4, 8], rank 1 of 2\n  2 weights in parts, ")
    assert "0 matmul at split_ranks.py:" in text
    assert ": by column" in text
    assert "all_reduce after 2 matmul, float64[4, 8]" in text
    assert "  a plan, FROZEN: float64[4, 8]\n" in text
    assert on(ranks, "weight_bytes") == [HIDDEN * INNER * 8] * 2


def test_what_cannot_be_split_is_refused_on_all_ranks(formed: Any) -> None:
    ranks = connected(formed)
    told = on(ranks, "refuse", "summed")
    assert all(one.startswith("leave cumsum at split_ranks.py:") for one in told), told
    ranks[0].ask("on", f"{SPLIT}:refuse", "summed")
    ranks[1].ask("on", f"{SPLIT}:refuse", "block")
    told = [rank.told() for rank in ranks]
    assert told[1] == "let all ranks plan the same function, of the same shapes: rank 0 refused it"
    ranks[0].ask("on", f"{SPLIT}:refuse", "block", 4)
    ranks[1].ask("on", f"{SPLIT}:refuse", "block", 6)
    told = [rank.told() for rank in ranks]
    assert [one.rpartition(": ")[2] for one in told] == ["rank 1 split another one", "rank 0 split another one"]


# --- pipelines


def test_micro_batches_go_through_stages_and_come_out_as_one_process_makes_them(formed: Any) -> None:
    """Stages of one rank after the other, or dealt out twice; several arrays between them; other shapes after that."""
    ranks = connected(formed)
    for micro_batches in (1, 4):
        told = on(ranks, "flow", "two", micro_batches, [0, 1, 2])
    assert told[1].startswith("rank 1 of 2: 2 stages, here 1\n  4 micro-batches, 5 ticks: 1 to fill, 3 steady, 1 to dr")
    told = on(ranks, "flow", "four", 4, [3, 4])
    assert told[0].startswith("rank 0 of 2: 4 stages, here 0, 2\n  4 micro-batches, 9 ticks: ")
    on(ranks, "flow", "four", 4, [3, 4], 12)
    assert on(ranks, "flow_apart") == [False, True]
    assert on(ranks, "flow_split") == ["FROZEN"] * 2
    assert on(ranks, "flow_alone") == [[False]] * 2


@pytest.mark.parametrize(("stages", "text"), [("raises", "ValueError('it cannot')"), ("no arrays", "'nothing'")])
def test_a_stage_that_raises_ends_the_run_on_all_ranks(formed: Any, stages: str, text: str) -> None:
    """At once, and by name; after that the group is formed again."""
    ranks = connected(formed)
    told = on(ranks, "flow", stages, 2, [0])
    assert errors(told)[0] == "GROUP_BROKEN"
    assert (told[0]["facts"]["reason"], told[0]["facts"]["ranks"]) == ("FAILED", [1])
    assert text in told[0]["message"]
    all_of(ranks, "reform")
    on(ranks, "flow", "two", 2, [0])


def test_what_no_pipeline_takes_is_refused_before_anything_is_sent(formed: Any) -> None:
    ranks = connected(formed)
    for args, text in (
        (("two", 3, [0]), "arrays have shapes [8, 8]; allowed: one first dimension, which 3 micro-batches divide"),
        (("two", 0, [0]), "micro_batches is 0; allowed: 1 or more"),
    ):
        told = on(ranks, "flow", *args)
        assert [one["message"] for one in told] == [text] * 2
    for rank, rows in zip(ranks, (8, 12), strict=True):
        rank.ask("on", f"{SPLIT}:flow", "two", 2, [0], rows)
    told = [rank.told() for rank in ranks]
    assert errors(told) == ["INVALID_ARGUMENT"] * 2
    assert told[1]["message"].endswith("unlike rank 1 are 0")
    on(ranks, "flow", "two", 2, [0])


def test_a_rank_dies_in_its_stage_and_plans_go_on_with_another_one(formed: Any, crew: Crew) -> None:
    """Pipelines and split plans begin anew: what is whose is a matter of the ranks that there are."""
    ranks = connected(formed)
    assert on(ranks, "agree", [0, 1, 2]) == ["FROZEN"] * 2
    on(ranks, "flow", "two", 4, [0])
    ranks[1].ask("on", f"{SPLIT}:die_in_a_stage")
    ranks[0].ask("on", f"{SPLIT}:flow", "two", 4, [1])
    told = ranks[0].told()
    assert (told["error"], told["facts"]["reason"], told["facts"]["ranks"]) == ("GROUP_BROKEN", "RANK_DIED", [1])
    ranks[1].process.wait()
    ranks[1].close()
    ranks[1] = crew.of(2)[1]
    ranks[0].ask("reform")
    ranks[1].ask("form", "tp", 1, 2)
    assert [rank.told() for rank in ranks][1] == 2
    on(ranks, "flow", "two", 4, [2])
    assert on(ranks, "agree", [0]) == ["WARM"] * 2
    assert on(ranks, "agree", [1, 2]) == ["FROZEN"] * 2
