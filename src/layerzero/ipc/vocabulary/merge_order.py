"""In which order a byte-pair model makes its tokens, for libraries that know tokens and no merges.

tokenizers merges the pair that comes first among its merges. tiktoken and SentencePiece merge the two neighbours whose
*text together* is the token of the best rank. Both take the same steps if each token has the rank of the merge that
makes it out of its own text alone: two neighbours x and y have come about inside of their own text, undisturbed, so
they are what the text xy comes to on its way, and that way passes through one state of two parts at most.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

_NONE = sys.maxsize  # the rank of a pair that is no merge


@dataclass(frozen=True)
class MergeOrder:
    """Tokens of two symbols and more, best rank first, and what must not be merged."""

    made: tuple[str, ...]  # by merges
    whole: tuple[str, ...]  # by no merges: found only as a whole piece, of models that look for those
    is_safe_whole: bool  # no two neighbours ever have the text of one of `whole`


def merge_order(tokens: Iterable[str], merges: Iterable[tuple[str, str]], symbols: Iterable[str]) -> MergeOrder:
    """The order of a model's tokens.

    `merges`: its pairs in order, `symbols`: what texts consist of at first. Tokens with other
    symbols are left out: no text comes to them. Takes some 2 us for each token, 8 where merges are in no order that a
    trainer finds them in."""
    ranks: dict[tuple[str, str], int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault(pair, rank)
    known = _last_merges(ranks) or {}
    is_of_symbols = frozenset(symbols).issuperset
    made: list[tuple[int, str]] = []
    whole: list[str] = []
    is_safe = True
    for token in tokens:
        if len(token) < 2 or not is_of_symbols(token):
            continue
        last = known.get(token, _NONE)
        if last == _NONE:
            parts, last = _merged(token, ranks)
            if len(parts) > 1:
                whole.append(token)
                is_safe = is_safe and len(parts) > 2
                continue
        made.append((last, token))
    return MergeOrder(tuple(token for _, token in sorted(made)), tuple(whole), is_safe)


def _last_merges(ranks: Mapping[tuple[str, str], int]) -> dict[str, int] | None:
    """The rank of the merge that makes each text that merges make, without taking all steps of each.

    `ranks`: in rising order. None where a pair comes before a merge that makes one of its parts, as in no trained
    model: here a merge of some rank leads to none of a lower one, so text xy comes to x and y and then to xy, unless
    the last part of x and the first of y have merged at some time before."""
    last: dict[str, int] = {}
    halves: dict[str, tuple[str, str]] = {}
    unmade: set[str] = set()  # parts of pairs so far
    for pair, rank in ranks.items():
        one, other = pair
        is_there = (len(one) == 1 or one in last) and (len(other) == 1 or other in last)
        text = one + other
        if not is_there:
            unmade.update(part for part in pair if len(part) != 1 and part not in last)
        elif text not in last and _is_undisturbed(one, other, ranks, last, halves):
            if text in unmade:
                return None
            last[text], halves[text] = rank, pair
    return last


def _is_undisturbed(
    one: str,
    other: str,
    ranks: Mapping[tuple[str, str], int],
    last: Mapping[str, int],
    halves: Mapping[str, tuple[str, str]],
) -> bool:
    """Whether no two parts of two neighbours have merged on the way: goes back over what was beside the border."""
    rank, other_rank = last.get(one, -1), last.get(other, -1)
    while rank != other_rank or rank >= 0:
        if rank > other_rank:
            one, gone = halves[one][1], rank
            rank = last.get(one, -1)
            is_first = ranks.get((one, other), _NONE) < gone
        else:
            other, gone = halves[other][0], other_rank
            other_rank = last.get(other, -1)
            is_first = ranks.get((one, other), _NONE) <= gone  # of equal pairs the one to the left comes first
        if is_first:
            return False
    return True


def _merged(text: str, ranks: Mapping[tuple[str, str], int]) -> tuple[list[str], int]:
    """What the text comes to, and the rank of the last merge."""
    parts, last = list(text), -1
    found = [ranks.get(pair, _NONE) for pair in pairwise(parts)]
    while found:
        best = min(found)
        if best == _NONE:
            break
        at, last = found.index(best), best
        parts[at] += parts.pop(at + 1)
        del found[at]
        if at < len(found):
            found[at] = ranks.get((parts[at], parts[at + 1]), _NONE)
        if at:
            found[at - 1] = ranks.get((parts[at - 1], parts[at]), _NONE)
    return parts, last
