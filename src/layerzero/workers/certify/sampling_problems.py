"""The problems of sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from layerzero.workers.certify.claims import Claims
from layerzero.workers.certify.number_generator import Numbers
from layerzero.workers.certify.problem import Problem
from layerzero.workers.certify.values import Values

SIZES = (12, 32, 33, 301)  # of vocabularies: one for each size of shape classes
ROWS = 3
_OF_FILTER = {
    "temperature": (0.5, 0.75, 2.0),
    "top_k": (5, 0, 1000),
    "top_p": (0.5, 1.0, 0.875),
    "min_p": (0.0625, 0.25, 0.0),
}
_KINDS = ("float32", "int64", "float32", "float32")  # of these


def _penalties(_: Claims) -> Iterator[Problem]:
    numbers = Numbers(31)
    settings = (Values((1,), [1.25]), Values((2,), [0.5, -0.25]), Values((2,), [0.125, 2.0]))
    for kind in ("int32", "int64"):
        for size in SIZES:
            places = numbers(2, 9).flat
            ids = Values((2, 9), [int(abs(v) * 16) % size if n % 4 else -1 - n for n, v in enumerate(places)])
            yield _penalized(f"{kind} ids of {size}", numbers(2, size), ids, settings, kind)
    for rows, length in ((0, 3), (2, 0)):
        given = Values((rows, length), [0] * (rows * length))
        yield _penalized(f"{rows} rows of {length} ids", numbers(rows, 4), given, (settings[0], None, None), "int64")


def _penalized(name: str, logits: Values, ids: Values, settings: tuple[Values | None, ...], kind: str) -> Problem:
    return Problem("penalize_logits", name, {}, (logits, ids, *settings), ("", kind, *["float32"] * 3))


def _filters(_: Claims) -> Iterator[Problem]:
    for name, logits, settings in filtered(Numbers(32)):
        yield Problem("filter_logits", name, {}, (logits, *settings), ("", *_KINDS))


def _samples(_: Claims) -> Iterator[Problem]:
    """One seed for all rows, or one for each; where nothing is filtered, also the largest of a row."""
    kinds = ("", "int64", "int64", *_KINDS)
    for n, (name, logits, given) in enumerate(filtered(Numbers(33))):
        seeds = Values((ROWS,), [7 + n, 2**40 + n, -1 - n]) if n % 2 else Values((1,), [-(2**62) - n])
        offsets = Values((ROWS,), [n, 2**33, -5]) if n % 3 else Values((1,), [n])
        settings = given if any(given[1:]) else (Values((ROWS,), (0.0, 0.75, 2.0)), *given[1:])
        if not logits.shape[0]:
            seeds = offsets = Values((1,), [0])
        yield Problem("sample", name, {}, (logits, seeds, offsets, *settings), kinds)


def _drafts(_: Claims) -> Iterator[Problem]:
    """Of the target and of the draft numbers from 0 on, which are no probabilities and need not be: some that are
    accepted, some that are not, rows that end before, and one that nothing is left of."""
    numbers, kinds = Numbers(34), ("", "int64", "", "int64", "int64")
    for n, (size, drafts, rows) in enumerate([*((size, 3, 4) for size in SIZES), (12, 0, 2), (12, 2, 0)]):
        for has_draft in (True, False):
            target, draft = (numbers(rows, steps, size) for steps in (drafts + 1, drafts))
            places = numbers(rows, drafts).flat
            ids = [-1 if abs(place) > 2.8 else int(abs(place) * 16) % size for place in places]
            p, q = ([max(value, 0.0) for value in values.flat] for values in (target, draft))
            if not has_draft:
                for row, token in enumerate(ids[: rows * drafts]):
                    if row % 2 and token >= 0:  # the target is as sure of it
                        p[(row // drafts * (drafts + 1) + row % drafts) * size + token] = 1.0
            seeds = Values((rows or 1,), [5 + n + row for row in range(rows or 1)]) if has_draft else Values((1,), [n])
            inputs = (
                *(Values(target.shape, p), Values((rows, drafts), ids), Values(draft.shape, q) if has_draft else None),
                *(seeds, Values((1,), [3 * n])),
            )
            name = f"{drafts} of {size}{', draft_probs' if has_draft else ''}"
            yield Problem("speculative_verify", name, {}, inputs, kinds)


def _trees(_: Claims) -> Iterator[Problem]:
    """Numbers are sixteenths of ids; of few, so that many are accepted."""
    numbers = Numbers(35)
    for kind in ("int32", "int64"):
        for size in (*SIZES, 1):
            drafts, wanted = ([int(abs(v) * 16) % 3 / 16 for v in numbers(4, size).flat] for _ in range(2))
            steps = [int(abs(v) * 16) % 4 for v in numbers(4, size).flat]
            above = [max(n % size - 1 - step, -1) for n, step in enumerate(steps)]
            drafts[2::7] = [-1 / 16] * len(drafts[2::7])
            inputs = (Values((4, size), drafts), Values((4, size), above), Values((4, size), wanted))
            yield Problem("tree_accept", f"{size} nodes, {kind} parents", {}, inputs, ("", kind, ""))
    nothing = Values((0, 4), [])
    yield Problem("tree_accept", "no rows", {}, (nothing, nothing, nothing), ("", "int64", ""))


def filtered(numbers: Numbers) -> Iterator[tuple[str, Values, tuple[Values | None, ...]]]:
    """Logits with temperature, top_k, top_p and min_p, for each class of shapes: some settings of each row, others one
    for all, and many ties."""
    for size in SIZES:
        for names in ((), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p", "min_p")):
            given = [
                _setting(name, len(names) == 1) if name in ("temperature", *names) else None for name in _OF_FILTER
            ]
            yield f"{size}, {' '.join(names)}", numbers(ROWS, size, scale=2.0), tuple(given)
    yield "no rows", numbers(0, 4), (None, Values((1,), [2]), None, None)


def _setting(name: str, is_each: bool) -> Values:
    values = _OF_FILTER[name]
    return Values((ROWS,), values) if is_each else Values((1,), values[:1])


PROBLEMS: dict[str, Callable[[Claims], Iterator[Problem]]] = {
    "penalize_logits": _penalties,
    "filter_logits": _filters,
    "sample": _samples,
    "speculative_verify": _drafts,
    "tree_accept": _trees,
}
