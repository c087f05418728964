"""The fewest environments: exact, verified as sets, and honest when it gave up."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations

import pytest

from layerzero.envs.matrix import cover
from layerzero.envs.matrix.cover import Cover, Pair, fewest


def pairs_of(text: str) -> set[Pair]:
    return {frozenset(word) for word in text.split()}


def always(group: tuple[str, ...]) -> bool:
    return True


def test_pairs_that_all_work_share_one_environment() -> None:
    """Nothing is split that need not be."""
    assert fewest("abc", pairs_of("ab ac bc"), always) == Cover((("a", "b", "c"),), True, ())


def test_a_chain_takes_two_environments() -> None:
    """a works with b and b with c, but a and c do not: sharing is not transitive."""
    found = fewest("abc", pairs_of("ab bc"), always)
    assert sorted(map(len, found.groups)) == [1, 2]
    assert found.is_fewest


def test_no_pair_works() -> None:
    """Then everyone gets an environment, in the order of the names."""
    assert fewest("cab", set(), always).groups == (("c",), ("a",), ("b",))


def test_nobody() -> None:
    """When no subject works in any environment there is nothing to cover."""
    assert fewest("", set(), always) == Cover((), True, ())


def test_a_set_that_fails_although_its_pairs_work_is_not_used() -> None:
    """a wants x<2 or y, b wants x>=2 or z: such sets fail only as a whole."""
    asked: list[tuple[str, ...]] = []

    def works(group: tuple[str, ...]) -> bool:
        asked.append(group)
        return set(group) != set("abc")

    found = fewest("abc", pairs_of("ab ac bc"), works)
    assert sorted(map(len, found.groups)) == [1, 2]
    assert found == Cover(found.groups, True, (("a", "b", "c"),))
    assert asked == [("a", "b", "c")]  # each set costs an installation: it is asked once, pairs never


def test_a_superset_of_a_failed_set_is_not_asked() -> None:
    """More requirements never mend a set."""
    asked: list[tuple[str, ...]] = []

    def works(group: tuple[str, ...]) -> bool:
        asked.append(group)
        return not set("abc") <= set(group)

    found = fewest("abcd", {frozenset(pair) for pair in combinations("abcd", 2)}, works)
    assert len(found.groups) == 2
    assert all(not set("abc") <= set(group) for group in found.groups)
    assert len(asked) == len(set(asked))


def brute_force(names: str, pairs: set[Pair], bad: Iterable[Pair]) -> int:
    """The fewest groups, by trying all partitions."""

    def partitions(rest: str) -> Iterable[list[str]]:
        if not rest:
            yield []
            return
        for smaller in partitions(rest[1:]):
            yield [rest[0], *smaller]
            for index, group in enumerate(smaller):
                yield [*smaller[:index], rest[0] + group, *smaller[index + 1 :]]

    def is_good(group: str) -> bool:
        every = all(frozenset(pair) in pairs for pair in combinations(group, 2))
        return every and not any(one <= set(group) for one in bad)

    return min(len(groups) for groups in partitions(names) if all(map(is_good, groups)))


@pytest.mark.parametrize("seed", range(40))
def test_as_few_as_brute_force_finds(seed: int) -> None:
    """Random graphs with random forbidden triples, against all partitions."""
    rng = random.Random(seed)
    names = "abcdefg"[: rng.randint(3, 7)]
    pairs = {frozenset(pair) for pair in combinations(names, 2) if rng.random() < 0.7}
    bad = [frozenset(triple) for triple in combinations(names, 3) if rng.random() < 0.2]
    found = fewest(names, pairs, lambda group: not any(one <= set(group) for one in bad))
    assert found.is_fewest
    assert sorted("".join("".join(group) for group in found.groups)) == sorted(names)
    assert len(found.groups) == brute_force(names, pairs, bad)


def test_a_search_that_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer then still works, but may not be the smallest."""
    monkeypatch.setattr(cover, "MAX_STEPS", 3)
    found = fewest("abcd", {frozenset(pair) for pair in combinations("abcd", 2)}, lambda group: "d" not in group)
    assert not found.is_fewest
    assert sorted(name for group in found.groups for name in group) == list("abcd")
    assert all("d" not in group for group in found.groups if len(group) > 2)
