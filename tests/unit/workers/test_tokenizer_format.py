"""ipc/vocabulary/tokenizer_format.py. That the names are true of the releases is in tests/envs/test_tokenizers.py."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.ipc.vocabulary.tokenizer_format import EXTENDED, MERGES_PAIRS, MERGES_STRINGS, PLAIN, tokenizer_format

BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}}
METASPACE = {"type": "Metaspace", "replacement": "_"}


def nested(component: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [{"type": "Sequence", "pretokenizers": [component]}]}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, PLAIN),
        ({"model": {"vocab": {}}}, PLAIN),
        ({"model": {**BPE, "merges": []}}, PLAIN),
        ({"model": {**BPE, "merges": ["a b"]}}, MERGES_STRINGS),
        ({"model": {**BPE, "merges": ["a b"], "ignore_merges": False}}, MERGES_STRINGS),
        ({"model": {**BPE, "merges": [["a", "b"]]}}, MERGES_PAIRS),
        ({"model": {**BPE, "merges": ["a b"], "byte_fallback": True}}, MERGES_STRINGS),
        ({"model": {**BPE, "merges": ["a b"], "ignore_merges": True}}, EXTENDED),
        ({"model": {"type": "Unigram", "byte_fallback": True}}, EXTENDED),
        ({"model": {"type": "Unigram", "byte_fallback": False}}, PLAIN),
        ({"model": BPE, "normalizer": {"type": "ByteLevel"}}, EXTENDED),
        ({"model": BPE, "normalizer": None, "decoder": {"type": "Invented"}}, EXTENDED),
        ({"model": BPE, "pre_tokenizer": nested({"type": "Whitespace"})}, PLAIN),
        ({"model": BPE, "pre_tokenizer": nested({"type": "FixedLength", "length": 2})}, EXTENDED),
        ({"model": BPE, "pre_tokenizer": {**METASPACE, "add_prefix_space": True}}, PLAIN),
        ({"model": BPE, "pre_tokenizer": {**METASPACE, "add_prefix_space": True, "prepend_scheme": "always"}}, PLAIN),
        ({"model": BPE, "pre_tokenizer": {**METASPACE, "add_prefix_space": True, "prepend_scheme": "first"}}, EXTENDED),
        ({"model": BPE, "pre_tokenizer": {**METASPACE, "add_prefix_space": False, "prepend_scheme": "never"}}, PLAIN),
        ({"model": BPE, "decoder": {**METASPACE, "prepend_scheme": "always", "split": True}}, EXTENDED),
        ({"model": BPE, "decoder": {**METASPACE, "add_prefix_space": True, "split": False}}, EXTENDED),
        ({}, EXTENDED),
        ({"model": "gpt2"}, EXTENDED),
    ],
)
def test_format_follows_what_the_file_uses(document: dict[str, Any], expected: str) -> None:
    """Each row is a file, or a setting, that 0.13 reads, refuses, or reads as something else."""
    assert tokenizer_format(document) == expected
