"""Both releases of tokenizers against the reference and against each other, through the kernels' flat buffers."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from tests import reference
from tests.envs.harness import Harnesses
from tests.make_vectors import BPE, WORD_PIECE, with_pairs

from layerzero.ipc.vocabulary.tensors import TensorSpec
from layerzero.ipc.vocabulary.tokenizer_format import EXTENDED, MERGES_PAIRS, tokenizer_format

OLD, NEW = "tokenizers-0.13", "tokenizers-0.23"
BOTH = pytest.mark.parametrize("backend", [OLD, NEW])
CAPACITY = 4096
Answer = dict[str, Any]


def file_of(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


def call(
    harnesses: Harnesses,
    backend: str,
    op: str,
    document: dict[str, Any],
    data: list[bytes],
    outs: list[TensorSpec],
    **attrs: Any,
) -> tuple[Answer, list[bytes]]:
    file = file_of(document)
    dtypes = {"tokenize": ("uint8", "int64"), "detokenize": ("int32", "int64")}[op]
    specs = [TensorSpec.contiguous("uint8", (len(file),))]
    for dtype, blob in zip(dtypes, data, strict=True):
        specs.append(TensorSpec.contiguous(dtype, (len(blob) // np.dtype(dtype).itemsize,)))
    attrs = {
        "tokenizer_digest": hashlib.sha256(file).hexdigest(),
        "tokenizer_format": tokenizer_format(document),
        **attrs,
    }
    return harnesses[backend].run(f"{backend}.{op}", op, specs, outs, attrs, [[file, *data]])


def tokenize(
    harnesses: Harnesses,
    backend: str,
    document: dict[str, Any],
    texts: list[str],
    capacity: int = CAPACITY,
    **attrs: Any,
) -> tuple[Answer, list[bytes]]:
    encoded = [text.encode() for text in texts]
    splits = np.array([0, *accumulate(map(len, encoded))], np.int64)
    outs = [
        TensorSpec.contiguous("int32", (capacity,)),
        TensorSpec.contiguous("int64", (len(texts) + 1,)),
        TensorSpec.contiguous("int32", (capacity, 2)),
    ]
    attrs = {"add_special_tokens": True, "max_length": None, "return_offsets": True, **attrs}
    return call(harnesses, backend, "tokenize", document, [b"".join(encoded), splits.tobytes()], outs, **attrs)


def tokens(answer: Answer, written: list[bytes]) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
    assert "error" not in answer, answer
    n_ids, n_splits, n_offsets = answer["results"][0]["sizes"]
    ids = np.frombuffer(written[0], np.int32)[:n_ids].tolist()
    splits = np.frombuffer(written[1], np.int64)[:n_splits].tolist()
    return (
        ids,
        splits,
        [tuple(pair) for pair in np.frombuffer(written[2], np.int32).reshape(-1, 2)[:n_offsets].tolist()],
    )


def detokenize(
    harnesses: Harnesses, backend: str, document: dict[str, Any], rows: list[list[int]], skip: bool
) -> tuple[Answer, list[bytes]]:
    flat = np.array([i for row in rows for i in row], np.int32)
    splits = np.array([0, *accumulate(map(len, rows))], np.int64)
    outs = [TensorSpec.contiguous("uint8", (CAPACITY,)), TensorSpec.contiguous("int64", (len(rows) + 1,))]
    data = [flat.tobytes(), splits.tobytes()]
    return call(harnesses, backend, "detokenize", document, data, outs, skip_special_tokens=skip)


def texts_of(answer: Answer, written: list[bytes]) -> list[str]:
    assert "error" not in answer, answer
    n_bytes, n_splits = answer["results"][0]["sizes"]
    splits = np.frombuffer(written[1], np.int64)[:n_splits].tolist()
    assert splits[-1] == n_bytes
    return [written[0][a:b].decode() for a, b in pairwise(splits)]


def some_texts(alphabet: list[str], seed: int) -> list[str]:
    chosen = random.Random(seed)
    return ["", " ", *("".join(chosen.choices(alphabet, k=chosen.randint(1, 40))) for _ in range(30))]


WORDS = ["kernel", "s", "run", "ning", "ENV", "iron", "é", "t", "zz", "un", " ", "  ", "\n"]
LETTERS = ["a", "b", "c", "é", " "]


@BOTH
@pytest.mark.parametrize(("special", "limit"), [(True, None), (False, None), (True, 5), (False, 3), (True, 2)])
def test_word_pieces_are_those_of_the_reference(
    harnesses: Harnesses, backend: str, special: bool, limit: int | None
) -> None:
    """Ids of another split of the text would be embedded without any error."""
    texts = some_texts(WORDS, seed=1)
    got = tokens(*tokenize(harnesses, backend, WORD_PIECE, texts, add_special_tokens=special, max_length=limit))
    assert got == reference.tokenize(WORD_PIECE, texts, add_special_tokens=special, max_length=limit)


@pytest.mark.parametrize(
    ("backend", "document"), [(OLD, BPE), (NEW, BPE), (NEW, with_pairs(BPE))], ids=["old", "new", "new-pairs"]
)
def test_byte_pairs_are_those_of_the_reference(harnesses: Harnesses, backend: str, document: dict[str, Any]) -> None:
    """Merges apply by rank, whichever way the file writes them."""
    texts = some_texts(LETTERS, seed=2)
    got = tokens(*tokenize(harnesses, backend, document, texts))
    assert got == reference.tokenize(document, texts, add_special_tokens=True, max_length=None)


@BOTH
@pytest.mark.parametrize("skip", [True, False])
def test_texts_are_those_of_the_reference(harnesses: Harnesses, backend: str, skip: bool) -> None:
    """Ids outside the vocabulary are left out; special tokens when asked."""
    chosen = random.Random(3)
    rows = [[], *([chosen.choice([*range(17), 500]) for _ in range(chosen.randint(1, 9))] for _ in range(20))]
    got = texts_of(*detokenize(harnesses, backend, WORD_PIECE, rows, skip))
    assert got == reference.detokenize(WORD_PIECE, rows, skip_special_tokens=skip)


@BOTH
def test_offsets_are_left_out_unless_asked_for(harnesses: Harnesses, backend: str) -> None:
    """They are two thirds of the output."""
    answer, _written = tokenize(harnesses, backend, WORD_PIECE, ["kernels"], return_offsets=False)
    assert answer["results"] == [{"sizes": [4, 2, 0]}]


@BOTH
def test_too_small_outputs_name_the_sizes_needed(harnesses: Harnesses, backend: str) -> None:
    """The client allocates these and calls again; nothing may be written past the buffers."""
    answer, _ = tokenize(harnesses, backend, WORD_PIECE, ["kernels run", "in"], capacity=3)
    assert answer["error"]["code"] == "OUTPUT_TOO_SMALL"
    assert answer["error"]["facts"] == {"needed": [8, 3, 8]}


@BOTH
def test_no_text_gives_no_tokens(harnesses: Harnesses, backend: str) -> None:
    """An empty batch is a batch."""
    assert tokens(*tokenize(harnesses, backend, WORD_PIECE, [])) == ([], [0], [])
    assert texts_of(*detokenize(harnesses, backend, WORD_PIECE, [], True)) == []


@BOTH
def test_rules_in_the_file_for_padding_and_truncation_do_not_apply(harnesses: Harnesses, backend: str) -> None:
    """Rows are ragged, and max_length is an argument."""
    document = copy.deepcopy(WORD_PIECE)
    document["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 16},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
    }
    document["padding"] = {**padding, "pad_token": "[UNK]"}
    texts = ["kernels running in", "un"]
    got = tokens(*tokenize(harnesses, backend, document, texts))
    assert got == reference.tokenize(WORD_PIECE, texts, add_special_tokens=True, max_length=None)


@BOTH
def test_limit_of_one_call_does_not_stay_for_the_next(harnesses: Harnesses, backend: str) -> None:
    """The parsed tokenizer is shared by all calls."""
    texts = ["kernels running in"]
    tokenize(harnesses, backend, WORD_PIECE, texts, max_length=3)
    got = tokens(*tokenize(harnesses, backend, WORD_PIECE, texts))
    assert got == reference.tokenize(WORD_PIECE, texts, add_special_tokens=True, max_length=None)


@BOTH
def test_wrong_calls_are_refused_by_value(harnesses: Harnesses, backend: str) -> None:
    """Each names what is wrong; none may reach the library, where some panic."""
    document, digest = WORD_PIECE, "0" * 64
    ids, out = np.array([3], np.int32).tobytes(), TensorSpec.contiguous("uint8", (64,))
    ends = TensorSpec.contiguous("int64", (2,))

    def splits(*values: int) -> bytes:
        return np.array(values, np.int64).tobytes()

    def refusal(answer: Answer) -> str:
        assert answer["error"]["code"] == "INVALID_ARGUMENT", answer
        return str(answer["error"]["message"])

    assert digest in refusal(tokenize(harnesses, backend, document, ["a"], tokenizer_digest=digest)[0])
    assert "no room for the 2 special" in refusal(tokenize(harnesses, backend, document, ["a"], max_length=1)[0])
    bad_text = {"add_special_tokens": True, "max_length": None, "return_offsets": False}
    outs = [TensorSpec.contiguous("int32", (9,)), ends, TensorSpec.contiguous("int32", (0, 2))]
    answer, _ = call(harnesses, backend, "tokenize", document, [b"a\xff", splits(0, 2)], outs, **bad_text)
    assert "not UTF-8" in refusal(answer)
    for wrong in (splits(0, 5), splits(1, 2), splits(0, 3, 2), b""):
        answer, _ = call(harnesses, backend, "tokenize", document, [b"ab", wrong], outs, **bad_text)
        assert "text_splits must" in refusal(answer)
    negative = np.array([-7], np.int32).tobytes()
    answer, _ = call(
        harnesses, backend, "detokenize", document, [negative, splits(0, 1)], [out, ends], skip_special_tokens=True
    )
    assert "-7 is negative" in refusal(answer)
    answer, _ = call(
        harnesses, backend, "detokenize", document, [ids, splits(0, 2)], [out, ends], skip_special_tokens=True
    )
    assert "splits must go from 0 to 1" in refusal(answer)


def test_broken_file_is_an_error_of_the_kernel(harnesses: Harnesses) -> None:
    """A Rust panic is no Exception in Python; it must not end the worker."""
    document = {**WORD_PIECE, "normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}
    answer, _ = tokenize(harnesses, NEW, document, ["a"])
    assert answer["error"]["code"] == "RuntimeError"
    assert "panicked" in answer["error"]["message"]


def variants() -> dict[str, dict[str, Any]]:
    """Files with one component or setting each, of those that a release may or may not know."""
    model = WORD_PIECE["model"]
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["k", -1.0], ["kernel", -2.0], ["▁", -3.0]]}
    metaspace = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    merged = BPE["model"]
    changes: dict[str, dict[str, Any]] = {
        "bert": {
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": None,
                "lowercase": True,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
        },
        "unicode normalizers": {
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}
        },
        "byte-level normalizer": {"normalizer": {"type": "ByteLevel"}},
        "byte-level": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}},
        "fixed length": {"pre_tokenizer": {"type": "FixedLength", "length": 4}},
        "digits and punctuation": {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    {"type": "Punctuation"},
                    {"type": "Whitespace"},
                ],
            }
        },
        "split": {
            "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\w+|\s"}, "behavior": "Isolated", "invert": False}
        },
        "word level": {"model": {"type": "WordLevel", "vocab": model["vocab"], "unk_token": "[UNK]"}},
        "unigram": {"model": unigram, "post_processor": None, "added_tokens": []},
        "unigram, byte fallback": {
            "model": {**unigram, "byte_fallback": True},
            "post_processor": None,
            "added_tokens": [],
        },
        "metaspace": {"pre_tokenizer": metaspace, "model": unigram, "post_processor": None, "added_tokens": []},
        "metaspace, first": {"pre_tokenizer": {**metaspace, "prepend_scheme": "first"}},
        "metaspace, no split": {"pre_tokenizer": {**metaspace, "prepend_scheme": "always", "split": False}},
        "metaspace, new form": {
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
        },
        "merges, ignored": {"model": {**merged, "ignore_merges": True}, "post_processor": None, "added_tokens": []},
        "merges as pairs": {"model": with_pairs(BPE)["model"], "post_processor": None, "added_tokens": []},
        "merges, suffix": {"model": {**merged, "byte_fallback": False}, "post_processor": None, "added_tokens": []},
        "roberta": {
            "post_processor": {
                "type": "RobertaProcessing",
                "sep": ["[SEP]", 2],
                "cls": ["[CLS]", 1],
                "trim_offsets": True,
                "add_prefix_space": True,
            }
        },
        "decoders": {"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}},
        "added tokens": {
            "added_tokens": [
                {
                    "id": 50,
                    "content": "<x>",
                    "single_word": False,
                    "lstrip": True,
                    "rstrip": True,
                    "normalized": False,
                    "special": True,
                },
                {
                    "id": 51,
                    "content": "in env",
                    "single_word": True,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": True,
                    "special": False,
                },
            ]
        },
    }
    return {name: {**WORD_PIECE, **change} for name, change in changes.items()}


PHRASES = [
    "kernels running",
    "Kernel 12,5 env-iron",
    "été kern el",
    "in env in env",
    "kernel<x> un",
    "  run   in",
    "ken k k",
    "日本 kernel",
]
PHRASES_OF_LETTERS = ["abc cab", "aéa", "", "bcb ab"]


@pytest.mark.parametrize("name", list(variants()))
def test_releases_agree_on_the_files_both_are_said_to_read(harnesses: Harnesses, name: str) -> None:
    """The format name is what keeps a file from a release that would refuse it, or read it as something else."""
    document = variants()[name]
    phrases = PHRASES_OF_LETTERS if document["model"]["type"] == "BPE" else PHRASES
    ids, splits, offsets = tokens(*tokenize(harnesses, NEW, document, phrases))
    if tokenizer_format(document) in (EXTENDED, MERGES_PAIRS):
        return
    assert tokens(*tokenize(harnesses, OLD, document, phrases)) == (ids, splits, offsets)
    rows = [ids[a:b] for a, b in pairwise(splits)]
    texts = [
        texts_of(*detokenize(harnesses, backend, document, rows, skip))
        for backend in (OLD, NEW)
        for skip in (True, False)
    ]
    assert texts[:2] == texts[2:]


def test_files_that_only_the_newer_release_reads_are_told_apart() -> None:
    """The names of the variants above whose content 0.13 refuses or misreads."""
    newer = {name for name, document in variants().items() if tokenizer_format(document) in (EXTENDED, MERGES_PAIRS)}
    assert newer == {
        "byte-level normalizer",
        "fixed length",
        "unigram, byte fallback",
        "metaspace, first",
        "metaspace, no split",
        "metaspace, new form",
        "merges, ignored",
        "merges as pairs",
    }
