"""ipc/vocabulary/tokenizer_identity.py and merge_order.py: which files other libraries compute exactly, and the order
of tokens. That the libraries do so is in tests/transformer_models/test_tokenizer_kernels.py."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.make_vectors import BPE, BYTE_LEVEL, CHARACTERS, EXTENDED, SPECIAL, WORD_PIECE, with_pairs

from layerzero.ipc.vocabulary import tokenizer_identity
from layerzero.ipc.vocabulary.merge_order import merge_order
from layerzero.ipc.vocabulary.tokenizer_identity import byte_pairs, tokenizer_parts

LLAMA_3 = min(tokenizer_identity.PATTERNS, key=lambda pattern: ("1,3" not in pattern, len(pattern)))
Change = Callable[[dict[str, Any]], object]


def library(document: dict[str, Any]) -> str:
    return tokenizer_parts(document, "digest")["tokenizer_id"]


def changed(document: dict[str, Any], change: Change) -> dict[str, Any]:
    new = copy.deepcopy(document)
    change(new)
    return new


def split_by(pattern: str, **options: Any) -> Change:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **options}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return lambda d: d.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]})


def added(text: str = "<x>", index: int = 264, **options: Any) -> Change:
    return lambda d: d["added_tokens"].append({"id": index, "content": text, **SPECIAL, **options})


def test_files_of_each_library() -> None:
    for document in (BYTE_LEVEL, with_pairs(BYTE_LEVEL), EXTENDED, changed(BYTE_LEVEL, split_by(LLAMA_3))):
        assert library(document) == "tiktoken"
    for document in (CHARACTERS, with_pairs(CHARACTERS)):
        assert library(document) == "sentencepiece"
    for document in (WORD_PIECE, BPE, {"model": {}}, {"model": {"type": "BPE", "merges": 3}}):
        assert library(document) == "digest"


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<x>": {"id": "<x>", "ids": [264], "tokens": ["<x>"]}},
}
KEPT: dict[str, Change] = {
    "an added token": added(),
    "a template": lambda d: d.update(post_processor=TEMPLATE),
    "no trimming": lambda d: d.update(post_processor={"type": "ByteLevel", "trim_offsets": False}),
    "an added token of the vocabulary": added("hello", 259),
}
OTHERS: dict[str, Change] = {
    "a normalizer": lambda d: d.update(normalizer={"type": "NFC"}),
    "a blank before": lambda d: d["pre_tokenizer"].update(add_prefix_space=True),
    "an unknown pattern": split_by(r"\w+|\W+"),
    "an inverted pattern": split_by(LLAMA_3, invert=True),
    "trimmed offsets": lambda d: d.update(post_processor={"type": "ByteLevel", "trim_offsets": True}),
    "roberta": lambda d: d.update(post_processor={"type": "RobertaProcessing", "trim_offsets": False}),
    "no decoder": lambda d: d.update(decoder=None),
    "dropout": lambda d: d["model"].update(dropout=0.1),
    "a suffix": lambda d: d["model"].update(end_of_word_suffix="</w>"),
    "no byte": lambda d: d["model"]["vocab"].pop("a"),
    "an id for two": lambda d: d["model"]["vocab"].update(a=3),
    "blanks that a token takes in": added(lstrip=True),
    "a token that is a word": added(single_word=True),
    "a token with another id than it gets": added(index=300),
    "merges of nothing": lambda d: d["model"]["merges"].append("x y"),
}


@pytest.mark.parametrize("name", [*KEPT, *OTHERS])
def test_what_makes_a_file_the_librarys_alone(name: str) -> None:
    """Each of these would give other ids or offsets somewhere."""
    document = changed(BYTE_LEVEL, {**KEPT, **OTHERS}[name])
    assert library(document) == ("tiktoken" if name in KEPT else "digest")
    assert (byte_pairs(document) is None) == (name in OTHERS)


def test_a_token_that_merges_leave_in_two_is_no_whole_piece() -> None:
    """tiktoken would put its halves together wherever they meet, the library only where they are a piece."""

    def extend(document: dict[str, Any]) -> None:
        document["model"]["vocab"]["lo"] = 264

    assert library(changed(EXTENDED, extend)) == "digest"
    assert library(changed(BYTE_LEVEL, extend)) == "tiktoken"  # where it is never made


def test_hashes_are_those_of_the_parts() -> None:
    """A change of one part changes its hash alone."""
    before = tokenizer_parts(BYTE_LEVEL, "digest")
    changes: dict[str, Change] = {
        "vocab_hash": lambda d: d["model"]["vocab"].update(zz=264),
        "merges_hash": lambda d: d["model"]["merges"].pop(),
        "added_tokens_hash": added(),
        "normalizer_id": lambda d: d.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]}),
    }
    for name, change in changes.items():
        after = tokenizer_parts(changed(BYTE_LEVEL, change), "digest")
        assert {key for key in before if before[key] != after[key]} - {"tokenizer_id"} == {name}
    assert before["normalizer_id"] == "none"
    assert tokenizer_parts(CHARACTERS, "digest")["normalizer_id"] == "Prepend+Replace"


PIECES = st.text("abc", min_size=1, max_size=3)
ANY = st.lists(st.tuples(PIECES, PIECES), max_size=12)
SOME = st.lists(st.text("abc", max_size=14), max_size=8)


def trained(choices: list[tuple[int, int]]) -> list[tuple[str, str]]:
    """Merges of what is there by then, as a trainer finds them."""
    pieces, merges = ["a", "b", "c"], []
    for one, other in choices:
        merges.append((pieces[one % len(pieces)], pieces[other % len(pieces)]))
        pieces.append("".join(merges[-1]))
    return merges


MERGES = ANY | st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=12).map(trained)


@given(MERGES, SOME, st.booleans())
def test_order_of_tokens_is_that_of_merges(merges: list[tuple[str, str]], texts: list[str], is_whole: bool) -> None:
    """Of any merges, trained or not: by the one rule and by the other every text has the same tokens."""
    tokens = ["a", "b", "c", *dict.fromkeys("".join(pair) for pair in merges)]
    order = merge_order(tokens, merges, {"a", "b", "c"})
    if is_whole and not order.is_safe_whole:
        return
    first = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
    ranks = {token: rank for rank, token in enumerate((*order.made, *(order.whole if is_whole else ())))}
    for text in texts:
        if is_whole and text in tokens:
            assert text in ranks or len(text) == 1
            continue
        by_merges = merged(text, lambda one, other: first.get((one, other)))
        assert merged(text, lambda one, other: ranks.get(one + other)) == by_merges


def merged(text: str, rank_of: Callable[[str, str], int | None]) -> list[str]:
    parts = list(text)
    while True:
        ranks = [(rank, i) for i, pair in enumerate(itertools.pairwise(parts)) if (rank := rank_of(*pair)) is not None]
        if not ranks:
            return parts
        _, i = min(ranks)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
