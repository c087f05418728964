"""Each kernel of tokenize and detokenize, whatever library it is of, against the tokenizers library of this program."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.transformer_models.tokenizers import CORPUS, TEXTS, all_of, llama_2, llama_3, random_texts
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import layerzero as lz
import layerzero.transformers as lzt
from layerzero.ipc.vocabulary.tokenizer_identity import GPT2, PATTERNS

SPECIAL = ["<s>", "</s>", "<s"]
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def byte_level(pattern: str) -> Tokenizer:
    """As GPT-2's or Llama 3's: byte-level, with added tokens of both kinds, of which some are parts of others."""
    rust = Tokenizer(models.BPE())
    if pattern == GPT2:
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        rust.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=ALPHABET, special_tokens=SPECIAL)
    rust.train_from_iterator(CORPUS, trainer)
    rust.add_tokens([AddedToken("<x>"), AddedToken("extra ", normalized=True), AddedToken("tra", normalized=False)])
    rust.add_special_tokens(["<é>"])
    rust.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return rust


def of_splits(rust: Tokenizer) -> Tokenizer:
    """With all merges that give a token, and whole pieces first: what Transformers makes of tiktoken's files."""
    document = json.loads(rust.to_str())
    vocab = document["model"]["vocab"]
    inner = vocab.keys() - set(SPECIAL)
    splits = [(vocab[t], t[:i], t[i:]) for t in inner for i in range(1, len(t)) if {t[:i], t[i:]} <= inner]
    splits.sort(key=lambda split: (split[0], vocab[split[1]], vocab[split[2]]))
    document["model"].update(merges=[[one, other] for _, one, other in splits], ignore_merges=True)
    return Tokenizer.from_str(json.dumps(document))


def extended() -> Tokenizer:
    return of_splits(byte_level(min(PATTERNS - {GPT2})))


FILES = {f"pattern {n}": functools.partial(byte_level, p) for n, p in enumerate(sorted(PATTERNS))}
FILES |= {"all splits": extended, "llama 2": lambda: llama_2().backend_tokenizer}
OTHER_TEXTS = [
    "".join(random.Random(seed).choices("  \n\r\t'sStTreRE LlVv1234567890,./é漢aB\u017fK\u2028<s</s><x>extra ", k=40))
    for seed in range(400)
]
# Planes of Unicode that have characters; the others, which have none or those for private use, are alike.
PLANES = (0, 1, 2, 3, 14)
EVERY_CHARACTER = [
    "".join(f"{chr(c)} a" if c % 3 else chr(c) for c in range(start, start + 512) if not 0xD800 <= c < 0xE000)
    for start in range(0, 0x110000, 512)
    if start >> 16 in PLANES or not start % 0x8000
]
SOME_CHARACTERS = [*EVERY_CHARACTER[:16], *EVERY_CHARACTER[16::64]]


@contextmanager
def by(backend: str, *ops: str) -> Iterator[None]:
    """All calls of these ops by one backend."""
    for op in ops:
        lz.lock(op, f"{backend}.{op}")
    try:
        yield
    finally:
        for op in ops:
            lz.unlock(op)


@pytest.mark.parametrize("name", list(FILES))
def test_ids_and_offsets_are_the_librarys(name: str) -> None:
    """Over texts of every kind."""
    _compare(name, [*TEXTS, *OTHER_TEXTS, *random_texts(100, seed=8), *SOME_CHARACTERS])


@pytest.mark.long
@pytest.mark.parametrize("name", list(FILES))
def test_every_character_is_the_librarys(name: str) -> None:
    """Libraries have tables of Unicode of their own, which may be of different years."""
    _compare(name, EVERY_CHARACTER)


def _compare(name: str, texts: list[str]) -> None:
    rust = FILES[name]()
    file = lz.TokenizerFile.from_bytes(rust.to_str().encode())
    backend = "sentencepiece" if name == "llama 2" else "tiktoken"
    expected = rust.encode_batch(texts)
    with by(backend, "tokenize"):
        ids, offsets = lz.tokenize(texts, file, return_offsets=True)
        assert lz.last_report().backend == backend
        assert lz.tokenize(texts[:40], file, add_special_tokens=False) == [
            one.ids for one in rust.encode_batch(texts[:40], add_special_tokens=False)
        ]
        rust.enable_truncation(5)
        assert lz.tokenize(texts[:40], file, max_length=5) == [one.ids for one in rust.encode_batch(texts[:40])]
    for text, one, row, places in zip(texts, expected, ids, offsets, strict=True):
        assert (row, places) == (one.ids, one.offsets), text[:80]


@pytest.mark.parametrize("name", [name for name in FILES if name != "llama 2"])
def test_texts_are_the_librarys(name: str) -> None:
    """Of any ids: broken characters, tokens that were added, ids that nobody has."""
    rust = FILES[name]()
    file = lz.TokenizerFile.from_bytes(rust.to_str().encode())
    chosen = random.Random(1)
    rows = [[chosen.randint(0, rust.get_vocab_size() + 3) for _ in range(chosen.randint(0, 30))] for _ in range(200)]
    for skips in (True, False):
        with by("tiktoken", "detokenize"):
            assert lz.detokenize(rows, file, skip_special_tokens=skips) == rust.decode_batch(
                rows, skip_special_tokens=skips
            )
            assert lz.last_report().backend == "tiktoken"


@pytest.mark.parametrize(("backend", "make"), [("tiktoken", llama_3), ("sentencepiece", llama_2)])
def test_a_tokenizer_of_transformers_with_another_library_behind(backend: str, make: Any) -> None:
    """Ids, offsets, masks, special tokens, truncation and padding; when its worker dies, the next library serves."""
    fast: PreTrainedTokenizerFast = make()
    ours = lzt.Tokenizer.of(fast)
    options: list[dict[str, Any]] = [
        {},
        {"padding": True, "padding_side": "left", "pad_to_multiple_of": 8, "return_tensors": "pt"},
        {"truncation": True, "max_length": 12, "stride": 3, "return_overflowing_tokens": True, "padding": True},
        {"padding": "max_length", "truncation": True, "max_length": 9, "return_special_tokens_mask": True},
    ]
    texts = [text for text in TEXTS if len(text) < 200]
    with by(backend, "tokenize"):
        for one in options:
            assert all_of(ours(texts, **one)) == all_of(fast(texts, **one)), one
            assert all_of(ours(texts, texts[::-1], **one)) == all_of(fast(texts, texts[::-1], **one)), one
        assert lz.last_report().backend == backend
        assert [row.outcome for row in lzt.report().rows if row.what == "tokenize"] == ["served"]
    report = lz.explain("tokenize", text="a", tokenizer=_file(fast))
    served = {one.kernel_id for one in report.candidates if not one.reasons}
    assert {f"{backend}.tokenize", "tokenizers-0.23.tokenize"} <= served
    with by(backend, "tokenize"):
        ours(CORPUS)
        os.kill(lz.last_report().worker_pid, signal.SIGKILL)
    assert all_of(ours(CORPUS)) == all_of(fast(CORPUS))


def _file(fast: PreTrainedTokenizerFast) -> lz.TokenizerFile:
    document = json.loads(fast.backend_tokenizer.to_str())
    return lz.TokenizerFile.from_bytes(json.dumps({**document, "post_processor": None}).encode())


def test_files_that_it_does_not_compute_exactly_are_refused() -> None:
    """By name, before any worker sees them."""
    document = json.loads(byte_level(GPT2).to_str())
    document["normalizer"] = {"type": "Lowercase"}
    report = lz.explain("tokenize", text="A", tokenizer=lz.TokenizerFile.from_bytes(json.dumps(document).encode()))
    reasons = {one.kernel_id: {str(reason.code) for reason in one.reasons} for one in report.candidates}
    assert "TOKENIZER_ID_MISMATCH" in reasons["tiktoken.tokenize"]
    assert "NORMALIZER_MISMATCH" in reasons["tiktoken.tokenize"]
    assert "TOKENIZER_ID_MISMATCH" in reasons["sentencepiece.tokenize"]
    assert not reasons["tokenizers-0.23.tokenize"]
