"""layerzero.text against Transformers: batches, chats, and answers token by token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.transformer_models.tokenizers import TEXTS, llama_2, llama_3, word_piece
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

import layerzero as lz
from layerzero import text

LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ '[' + message.role + '] ' }}{% generation %}{{ message['content'] | trim }}"
    "{% endgeneration %}{{ eos_token }}\n"
    "{%- endfor %}\n{% if tools %}\n  {{ tools | tojson(indent=2) }}\n{% endif %}\n"
    "{% if add_generation_prompt %}[assistant] {% endif %}{{ date_string | default('today') }}"
)
CHAT = [
    {"role": "user", "content": "  What is <b>2 & 2</b>? "},
    {"role": "assistant", "content": "é \U0001f600 "},
    {"role": "user", "content": "And\nnow"},
]
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds, é", "parameters": {"a": 1.5, "b": None}}}
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, as Transformers saves it."""
    path = tmp_path_factory.mktemp("model")
    theirs = llama_3()
    theirs.add_special_tokens({"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"})
    theirs.chat_template = LLAMA
    theirs.save_pretrained(path)
    return path


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "options", [{}, {"max_length": 7}, {"max_length": 9, "padding": "max_length"}, {"pad_to_multiple_of": 8}]
)
def test_batches_are_those_of_transformers(folder: Path, side: str, options: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, padding_side=side)
    expected = theirs(
        TEXTS,
        **{"padding": "longest", **options},
        truncation="max_length" in options,
        return_tensors="np",
        return_offsets_mapping=True,
    )
    batch = text.Tokenizer(folder)(TEXTS, padding_side=side, return_offsets=True, **options)
    assert np.array_equal(batch.ids, expected["input_ids"])
    assert np.array_equal(batch.attention_mask, expected["attention_mask"])
    special = [index for index, token in theirs.added_tokens_decoder.items() if token.special]  # which decoding skips
    is_padding = np.asarray(expected["attention_mask"]) == 0
    assert np.array_equal(batch.special_tokens_mask, np.isin(expected["input_ids"], special) | is_padding)
    for row, length, offsets in zip(expected["offset_mapping"].tolist(), batch.lengths, batch.offsets, strict=True):
        kept = row[len(row) - length :] if side == "left" else row[:length]
        assert [tuple(pair) for pair in kept] == list(offsets)


def test_arrays_are_of_the_kind_that_was_asked_for(folder: Path) -> None:
    batch = text.Tokenizer(folder)("Kernels run", dtype=torch.int32)
    assert batch.ids.dtype == batch.attention_mask.dtype == torch.int32
    assert batch.ids.shape == (1, batch.lengths[0])
    weight = torch.randn(2000, 8)
    assert torch.equal(lz.embedding(batch.ids, weight), torch.nn.functional.embedding(batch.ids, weight))
    copies = lz.last_report().copies
    assert not any(copy.arg == "ids" for copy in copies)  # they lie where workers reach them
    assert text.Tokenizer(folder)([]).ids.shape == (0, 0)


def test_texts_that_come_again_cost_no_call(folder: Path) -> None:
    tokenizer = text.Tokenizer(folder, cache_nbytes=1 << 20)
    first = tokenizer(TEXTS)
    before = lz.last_report()
    again = tokenizer([*TEXTS[::-1]])
    assert lz.last_report() is before
    assert (first.cached, again.cached) == (0, len(TEXTS))
    assert np.array_equal(first.ids, again.ids[::-1])
    assert tokenizer([TEXTS[3], "another"], add_special_tokens=False).cached == 0
    assert tokenizer.cache_info().entries == len(TEXTS) + 2


@pytest.mark.parametrize(
    "options",
    [{}, {"add_generation_prompt": True}, {"tools": TOOLS}, {"date_string": "1 May"}, {"continue_final_message": True}],
)
def test_chats_are_those_of_transformers(folder: Path, options: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    tokenizer = text.Tokenizer(folder)
    expected = theirs.apply_chat_template(CHAT, tokenize=False, **options)
    assert tokenizer.chat(CHAT, **options) == expected
    ids = tokenizer(expected, add_special_tokens=False).ids[0].tolist()
    assert ids == theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False, **options)
    with pytest.raises(lz.InvalidArgument, match="the chat template refuses this chat: no system"):
        tokenizer.chat([{"role": "system", "content": ""}])


@pytest.mark.parametrize("make", [llama_2, llama_3])
def test_streams_give_the_text_of_all_tokens(make: Any) -> None:
    rust: Tokenizer = make().backend_tokenizer
    tokenizer = text.Tokenizer(rust.to_str().encode())
    rows = [row.ids for row in rust.encode_batch(TEXTS, add_special_tokens=False)]
    if make is llama_3:  # Llama 2's decoder takes text back: a run of bytes is none of it where one is no character's
        rng = random.Random(5)
        rows += [[rng.randrange(rust.get_vocab_size()) for _ in range(40)] for _ in range(10)]
    streams = tokenizer.streams(len(rows))
    parts = [""] * len(rows)
    for step in range(max(map(len, rows))):
        gained = streams.add([row[step] if step < len(row) else None for row in rows])
        parts = [part + more for part, more in zip(parts, gained, strict=True)]
    parts = [part + more for part, more in zip(parts, streams.finish(), strict=True)]
    assert parts == rust.decode_batch(rows)
    row, theirs, ours = rows[3], DecodeStream(skip_special_tokens=True), tokenizer.stream()
    assert [ours.add(token) for token in row] == [theirs.step(rust, token) or "" for token in row]


def test_what_cannot_be_is_said(folder: Path, tmp_path: Path) -> None:
    file = word_piece().backend_tokenizer.to_str().encode()
    bare = text.Tokenizer(file)
    with pytest.raises(lz.ConfigError, match="no token for padding, and these texts differ in length; pass pad_token="):
        bare(["a", "a b c d e"])
    assert bare("a b").lengths == (4,)
    assert text.Tokenizer(file, pad_token="[PAD]")(["a", "a b"]).ids[0, -1] == 0
    with pytest.raises(lz.ConfigError, match="has no token '<no>', which is to be the pad_token"):
        text.Tokenizer(file, pad_token="<no>")
    with pytest.raises(lz.ConfigError, match="has no chat template 'default', only: none; pass chat_template="):
        bare.chat(CHAT)
    with pytest.raises(lz.InvalidArgument, match="padding is False; allowed: longest or max_length"):
        bare("a", padding=False)
    with pytest.raises(lz.InvalidArgument, match='padding="max_length" needs max_length='):
        bare("a", padding="max_length")
    with pytest.raises(lz.InvalidArgument, match="text 1 is int; allowed: str"):
        bare(["a", 1])
    (tmp_path / "tokenizer.json").write_bytes(file)
    (tmp_path / "tokenizer_config.json").write_text("[", encoding="utf-8")
    with pytest.raises(lz.ConfigError, match=r"tokenizer_config\.json cannot be read"):
        text.Tokenizer(tmp_path)
