"""layerzero.transformers.Tokenizer against the fast tokenizer that it was made from."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.transformer_models.architectures import ARCHITECTURES, Architecture
from tests.transformer_models.tokenizers import CORPUS, KINDS, TEXTS, all_of, minilm, random_texts
from tokenizers import AddedToken, normalizers
from tokenizers.implementations import CharBPETokenizer
from transformers import AutoTokenizer, CLIPTokenizer, PreTrainedTokenizerFast, pipeline

import layerzero as lz
import layerzero.transformers as lzt
from layerzero.transformers import running

OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_special_tokens": False},
    {"padding": True},
    {"padding": True, "padding_side": "left", "pad_to_multiple_of": 8, "return_tensors": "pt"},
    {"padding": True, "pad_to_multiple_of": 8, "truncation": True, "max_length": 24},
    {"truncation": True, "max_length": 12, "stride": 3, "return_overflowing_tokens": True, "padding": True},
    {
        "padding": "max_length",
        "truncation": True,
        "max_length": 9,
        "return_special_tokens_mask": True,
        "return_offsets_mapping": True,
        "return_length": True,
        "return_token_type_ids": True,
        "return_tensors": "np",
    },
    {"return_attention_mask": False, "return_token_type_ids": False},
]
ONLY_PAIRS: list[dict[str, Any]] = [
    {"truncation": "only_first", "max_length": 1100},
    {"truncation": "only_second", "max_length": 1100, "stride": 5, "return_overflowing_tokens": True},
    {"truncation": "only_second", "max_length": 40},  # where the first is longer, an error
]


@functools.cache
def fast(name: str) -> PreTrainedTokenizerFast:
    return KINDS[name]()


@functools.cache
def ours(name: str) -> lzt.Tokenizer:
    return lzt.Tokenizer.of(fast(name))


def outcomes(what: str = "tokenize") -> list[str]:
    return [row.outcome for row in lzt.report().rows if row.what == what]


@pytest.mark.parametrize("name", list(KINDS))
def test_batches_are_those_of_the_library(name: str) -> None:
    """Ids, offsets, masks, types, tokens, words, and what was cut off."""
    for options in OPTIONS:
        found, expected = ours(name)(TEXTS, **options), fast(name)(TEXTS, **options)
        assert all_of(found) == all_of(expected), options
    if name != "unigram":
        assert outcomes() == ["served"]
        assert outcomes("word ids") == ["handed to tokenizers: no kernel gives them"]


@pytest.mark.parametrize("name", list(KINDS))
def test_pairs_are_those_of_the_library(name: str) -> None:
    """Of each text with each other, either side cut, and cut on the left."""
    pairs = TEXTS[::-1]
    for side in ("right", "left"):
        one, other = copy.deepcopy(ours(name)), copy.deepcopy(fast(name))
        one.truncation_side = other.truncation_side = side
        for options in [OPTIONS[index] for index in (0, 1, 3, 6)] + ONLY_PAIRS * (side == "right"):
            found, expected = (result_of(it, TEXTS[1:-1], pairs[1:-1], **options) for it in (one, other))
            assert found == expected, options


def result_of(tokenizer: PreTrainedTokenizerFast, *texts: list[str], **options: Any) -> Any:
    """Or the error."""
    try:
        return all_of(tokenizer(*texts, **options))
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", list(KINDS))
def test_single_texts_and_decoding(name: str) -> None:
    """encode, tokenize, decode and batch_decode."""
    for text in TEXTS:
        ids = ours(name).encode(text)
        assert ids == fast(name).encode(text)
        assert ours(name).tokenize(text) == fast(name).tokenize(text)
        assert all_of(ours(name)(text, return_tensors="pt")) == all_of(fast(name)(text, return_tensors="pt"))
    for skip in (True, False):
        rows = fast(name)(TEXTS, padding=True, return_tensors="pt")["input_ids"]
        assert ours(name).batch_decode(rows, skip_special_tokens=skip) == fast(name).batch_decode(
            rows, skip_special_tokens=skip
        )
        for ids in ([], 7, [7], [10**6], rows[3]):
            assert ours(name).decode(ids, skip_special_tokens=skip) == fast(name).decode(ids, skip_special_tokens=skip)
    assert outcomes("detokenize") == ["served"]


@pytest.mark.parametrize("name", ["word pieces", "byte pairs", "unigram"])
def test_random_texts(name: str) -> None:
    """Characters from all planes, in no language."""
    texts = random_texts(150, seed=5)
    assert all_of(ours(name)(texts)) == all_of(fast(name)(texts))


@pytest.mark.long
@pytest.mark.parametrize("name", list(KINDS))
def test_many_random_texts(name: str) -> None:
    """And each with another."""
    texts = random_texts(200, seed=6)
    for options in (OPTIONS[0], OPTIONS[4]):
        assert all_of(ours(name)(texts, **options)) == all_of(fast(name)(texts, **options))
        assert all_of(ours(name)(texts, texts[::-1], **options)) == all_of(fast(name)(texts, texts[::-1], **options))


def test_a_tokenizer_of_a_package() -> None:
    """all-MiniLM-L6-v2's, where it is installed; else one that was saved just now stands for it."""
    path = minilm()
    rust = fast("word pieces").backend_tokenizer
    library = PreTrainedTokenizerFast(tokenizer_object=rust.from_file(str(path)) if path else rust)
    library.pad_token = "[PAD]"
    one = lzt.Tokenizer.of(library)
    for options in OPTIONS:
        assert all_of(one(TEXTS, **options)) == all_of(library(TEXTS, **options))


def test_last_report_has_the_backend_and_the_next_one_serves_when_it_dies() -> None:
    """Both releases take word pieces, merges, which the newer one writes in a form that the older cannot read, and
    prefixes, likewise."""
    both = {"tokenizers-0.13.tokenize", "tokenizers-0.23.tokenize"}
    for name in ("word pieces", "byte pairs", "unigram"):
        assert ours(name)(CORPUS).data == fast(name)(CORPUS).data
        report = lz.last_report()
        assert (report.op, report.backend) in {("tokenize", kernel_id.rpartition(".")[0]) for kernel_id in both}
        assert {candidate.kernel_id for candidate in report.candidates if not candidate.reasons} == both
    os.kill(report.worker_pid, signal.SIGKILL)
    for name in ("word pieces", "byte pairs", "unigram"):
        assert all_of(ours(name)(CORPUS)) == all_of(fast(name)(CORPUS))
        assert lz.last_report().worker_pid != report.worker_pid
    ours(name).decode([5, 6])
    assert lz.last_report().op == "detokenize"
    assert outcomes() == ["served"]


def test_what_is_handed_over_is_counted() -> None:
    """And is the library's result."""
    one, library = copy.deepcopy(ours("word pieces")), copy.deepcopy(fast("word pieces"))
    words = [["kernels", "running"], ["été"], []]
    assert all_of(one(words, is_split_into_words=True)) == all_of(library(words, is_split_into_words=True))
    special = {"split_special_tokens": True}
    assert all_of(one(TEXTS, **special)) == all_of(library(TEXTS, **special))
    for broken in (["\ud800"], [3], "\udfff"):
        assert result_of(one, broken) == result_of(library, broken)
    with pytest.raises(OverflowError):
        one.decode([-1])
    assert set(outcomes()) == {
        "handed to tokenizers: words that are split already",
        "handed to tokenizers: split_special_tokens",
        "handed to tokenizers: error INVALID_ARGUMENT",
    }
    assert outcomes("detokenize") == ["handed to tokenizers: error INVALID_ARGUMENT"]


def test_a_model_that_draws_at_random_is_the_librarys() -> None:
    """No kernel draws."""
    one = copy.deepcopy(ours("gpt2"))
    one.backend_tokenizer.model.dropout = 1.0
    assert len(one("kernels").input_ids) == 7
    one.backend_tokenizer.model.dropout = None
    assert all_of(one("kernels")) == all_of(fast("gpt2")("kernels"))
    assert set(outcomes()) == {"served", "handed to tokenizers: a model that draws at random"}


def test_changes_of_a_tokenizer_count_at_once() -> None:
    """The kernel's file is that of the tokenizer as it is: vocabulary, added tokens, normalizer and its settings."""
    one, library = copy.deepcopy(ours("word pieces")), copy.deepcopy(fast("word pieces"))
    changes = [
        lambda it: it.add_tokens(["kern", AddedToken("(x)", single_word=True)]),
        lambda it: it.add_special_tokens({"extra_special_tokens": ["<new>"]}),
        lambda it: setattr(it.backend_tokenizer.normalizer, "lowercase", False),
        lambda it: setattr(it.backend_tokenizer, "normalizer", normalizers.NFKC()),
        lambda it: setattr(it.backend_tokenizer.model, "continuing_subword_prefix", ""),
        lambda it: setattr(it.backend_tokenizer, "post_processor", None),
        lambda it: setattr(it.backend_tokenizer, "model", fast("bert").backend_tokenizer.model),
    ]
    texts = [*TEXTS[:8], "kernels kern(x) (x) <new>KERNEL"]
    before = all_of(one(texts))
    for change in changes:
        change(one)
        change(library)
        now = all_of(one(texts))
        assert now == all_of(library(texts))
        assert now != before
        before = now
    assert all_of(ours("word pieces")(texts)) == all_of(fast("word pieces")(texts))


def test_tokens_of_a_normalizer_are_handed_over() -> None:
    """The library's token has another text then than the vocabulary's."""
    one, library = copy.deepcopy(ours("word pieces")), copy.deepcopy(fast("word pieces"))
    for it in (one, library):
        it.add_tokens([AddedToken("MORE", lstrip=True, normalized=True)])
    assert all_of(one("some   more")) == all_of(library("some   more"))
    assert outcomes() == ["handed to tokenizers: an added token that is not written as in the vocabulary"]
    for it in (one, library):
        it.add_tokens([AddedToken("EXTRA", normalized=True)])
    lzt.clear()
    one("an EXTRA kernel")  # either of them in the library, too
    assert outcomes() == ["handed to tokenizers: added tokens that the normalizer makes one"]


def _loaded(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 (our own)


@pytest.mark.parametrize("name", list(KINDS))
def test_copies_and_files(name: str, tmp_path: Path) -> None:
    """As the fast tokenizer's; what was saved is a fast tokenizer for those who have no LayerZero."""
    one, text = ours(name), "Kernels running, été 😀"
    expected = all_of(fast(name)(text))
    pickled = pickle.dumps(one)
    for found in (copy.copy(one), copy.deepcopy(one), _loaded(pickled), lzt.Tokenizer.of(one)):
        assert isinstance(found, lzt.Tokenizer)
        assert isinstance(found, type(fast(name)))
        assert all_of(found(text)) == expected
    changed = copy.deepcopy(one)
    changed.add_tokens(["running"])
    assert all_of(one(text)) == expected != all_of(changed(text))
    one.save_pretrained(tmp_path / "ours")
    fast(name).save_pretrained(tmp_path / "fast")
    for file in (tmp_path / "fast").iterdir():
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes()
    assert type(AutoTokenizer.from_pretrained(tmp_path / "ours")) is type(
        AutoTokenizer.from_pretrained(tmp_path / "fast")
    )
    loaded = lzt.Tokenizer.from_pretrained(tmp_path / "ours")
    assert isinstance(loaded, lzt.Tokenizer)
    assert all_of(loaded(text)) == all_of(AutoTokenizer.from_pretrained(tmp_path / "fast")(text))
    (encoding,) = _loaded(pickle.dumps(one(text))).encodings
    assert encoding.word_ids == fast(name)(text).word_ids()


def test_made_of_a_file(tmp_path: Path) -> None:
    """A tokenizer.json alone."""
    path = tmp_path / "tokenizer.json"
    fast("gpt2").backend_tokenizer.save(str(path))
    expected = fast("gpt2")("kernels").input_ids
    assert lzt.Tokenizer.from_pretrained(path)("kernels").input_ids == expected
    assert lzt.Tokenizer(tokenizer_file=str(path))("kernels").input_ids == expected
    assert outcomes() == ["served"]
    with pytest.raises(lz.InvalidArgument, match=r"^tokenizer is str; allowed: a fast tokenizer"):
        lzt.Tokenizer.of("gpt2")


def test_a_class_that_puts_in_a_decoder_of_its_own() -> None:
    """CLIP's does."""
    rust = CharBPETokenizer()
    rust.train_from_iterator(["kernels run in environments"] * 3, vocab_size=60, special_tokens=[], show_progress=False)
    model = json.loads(rust.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    library = CLIPTokenizer(vocab={**model["vocab"], "<|endoftext|>": 100, "<|startoftext|>": 101}, merges=merges)
    one = lzt.Tokenizer.of(library)
    ids = library("kernels run").input_ids
    assert one("kernels run").input_ids == ids
    assert one.decode(ids, skip_special_tokens=True) == library.decode(ids, skip_special_tokens=True)
    assert outcomes("detokenize") == ["served"]


def test_pipelines_and_generate() -> None:
    """Texts in, texts out, alone and as a batch that is padded on the left."""
    known = next(one for one in ARCHITECTURES if one.name == "llama")
    llama = Architecture(known.name, known.model, known.kind, {**known.only, "vocab_size": 600}).build("eager")
    prompts = ["Kernels run", "été 😀 in an environment of its own"]
    found = []
    for tokenizer in (fast("gpt2"), ours("gpt2")):
        pipe = pipeline("text-generation", model=llama, tokenizer=tokenizer, device="cpu")
        piped = pipe(prompts, max_new_tokens=5, do_sample=False)
        batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        generated = llama.generate(**batch, max_new_tokens=5, do_sample=False)
        found.append((piped, tokenizer.batch_decode(generated, skip_special_tokens=True)))
    assert found[0] == found[1]
    assert found[1][1][0].startswith(prompts[0])
    assert outcomes() == outcomes("detokenize") == ["served"]


def test_chat_templates() -> None:
    """Transformers' own code, which calls the tokenizer."""
    template = "{% for one in messages %}<s>{{ one.role }}: {{ one.content }}</s>{% endfor %}"
    messages = [{"role": "user", "content": "Kernels?"}, {"role": "assistant", "content": "été"}]
    found = [
        it.apply_chat_template(messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=False)
        for it in (ours("byte pairs"), fast("byte pairs"))
    ]
    assert found[0].data == found[1].data
    assert outcomes() == ["served"]


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is the library's."""
    monkeypatch.setattr(running, "IS_DISABLED", True)
    one = lzt.Tokenizer.of(fast("unigram"))
    assert all_of(one(TEXTS)) == all_of(fast("unigram")(TEXTS))
    assert one.decode([5, 6]) == fast("unigram").decode([5, 6])
    assert {row.outcome for row in lzt.report().rows} == {"handed to tokenizers: LAYERZERO_DISABLE"}
