"""In which order a byte-pair model makes its tokens, for libraries that know tokens and no merges.

tokenizers merges the pair that comes first among its merges. tiktoken and SentencePiece merge the two neighbours whose
*text together* is the token of the best rank. Both take the same steps if each token has the rank of the merge that
makes it out of its own text alone: two neighbours x and y have come about inside of their own text, undisturbed, so
they are what the text xy comes to on its way, and that way passes through one state of two parts at most.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

_NONE = sys.maxsize  # the rank of a pair that is no merge


@dataclass(frozen=True)
class MergeOrder:
    """Tokens of two symbols and more, best rank first, and what must not be merged."""

    made: tuple[str, ...]  # by merges
    whole: tuple[str, ...]  # by no merges: found only as a whole piece, of models that look for those
    is_safe_whole: bool  # no two neighbours ever have the text of one of `whole`


def merge_order(tokens: Iterable[str], merges: Iterable[tuple[str, str]], symbols: Container[str]) -> MergeOrder:
    """The order of a model's tokens.

    `merges`: its pairs in order, `symbols`: what texts consist of at first. Tokens with other
    symbols are left out: no text comes to them. Takes some 5 us for each token."""
    ranks: dict[tuple[str, str], int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault(pair, rank)
    made: list[tuple[int, str]] = []
    whole: list[str] = []
    is_safe = True
    for token in tokens:
        if len(token) < 2 or not all(symbol in symbols for symbol in token):
            continue
        parts, last = _merged(token, ranks)
        if len(parts) == 1:
            made.append((last, token))
        else:
            whole.append(token)
            is_safe = is_safe and len(parts) > 2
    return MergeOrder(tuple(token for _, token in sorted(made)), tuple(whole), is_safe)


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
