"""A rust tokenizer of the tokenizers library, whose texts and ids go to LayerZero's kernels."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Encoding

import layerzero as lz
from layerzero.transformers import running
from layerzero.transformers.encodings import ServedEncoding, raw_encoding
from layerzero.transformers.running import HandedOver

OTHERWISE = "handed to tokenizers"
_SETTINGS = (  # of models, which may be set one by one
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "max_input_chars_per_word",
)
_RANDOM = ("dropout", "alpha", "nbest_size")
_CHANGES = frozenset({"add_tokens", "add_special_tokens", "train", "train_from_iterator"})

Text = str | tuple[str, str]


class File:
    """A rust tokenizer as kernels get it: its tokenizer.json without what comes after the model, which stays here, and
    with merges and prefixes as all releases of the library read them."""

    def __init__(self, rust: tokenizers.Tokenizer) -> None:
        """Raises HandedOver for a tokenizer that no file can say."""
        try:
            document = json.loads(rust.to_str())
        except Exception as error:  # the library has no class of its own for them
            raise HandedOver("a part of it is written in Python") from error
        document.update(post_processor=None, truncation=None, padding=None)
        model = document["model"]
        vocabulary, merges = model.get("vocab"), model.get("merges")
        if isinstance(vocabulary, dict) and len(set(vocabulary.values())) < len(vocabulary):
            raise HandedOver("an id stands for several tokens")
        if merges and all(_is_plain(merge) for merge in merges):
            model["merges"] = [" ".join(merge) for merge in merges]
        _say_prefixes(document["pre_tokenizer"])
        _say_prefixes(document["decoder"])
        self.content = lz.TokenizerFile.from_bytes(json.dumps(document, ensure_ascii=False).encode())
        self.unknown_id = model.get("unk_id") if model.get("type") == "Unigram" else None
        self.unknown = model.get("unk_token")
        self.added = rust.get_added_tokens_decoder()
        self.normalizer = rust.normalizer
        if self.normalizer is not None:
            contents = [self.normalizer.normalize_str(one.content) for one in self.added.values() if one.normalized]
            if len(set(contents)) < len(contents):  # which of them it finds is a matter of the order of their coming
                raise HandedOver("added tokens that the normalizer makes one")
        self._token_of = rust.id_to_token
        self._tokens: dict[int, str] = {}
        self._library: tokenizers.Tokenizer | None = None

    def tokens(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> list[str]:
        """The tokens' texts. Raises HandedOver where the library's is not the vocabulary's."""
        known, found = self._tokens, []
        for index, (start, end) in zip(ids, offsets, strict=True):
            part, added = text[start:end], self.added.get(index)
            if index == self.unknown_id and (added is None or part.strip() != added.content):
                raise HandedOver("pieces that a Unigram model does not know")
            if added is not None:
                found.append(self._added(added, part))
                continue
            token = known.get(index)
            if token is None:
                token = known[index] = str(self._token_of(index))
            found.append(token)
        return found

    def words(self, text: str) -> list[int | None]:
        """The word of each token of a text, by the library."""
        if self._library is None:
            self._library = tokenizers.Tokenizer.from_str(self.content.data.decode())
        found: list[int | None] = self._library.encode(text, add_special_tokens=False).word_ids
        return found

    def _added(self, token: AddedToken, part: str) -> str:
        """As the text has it, with the blanks that it takes in; or as the normalizer makes it."""
        if not token.normalized or self.normalizer is None:
            if part.strip() == token.content.strip():
                return part
        elif self.normalizer.normalize_str(token.content) == token.content and part == part.strip():
            return str(token.content)
        if token.content == self.unknown:  # the model's own answer
            return str(token.content)
        raise HandedOver("an added token that is not written as in the vocabulary")


class State:
    """What is remembered of a rust tokenizer, until it changes. Copies and files of it are empty."""

    def __init__(self) -> None:
        self.file: File | None = None
        self.parts: tuple[Any, ...] = ()
        self.decode: Callable[..., str] | None = None  # where somebody put one in

    def __reduce__(self) -> tuple[Any, ...]:
        return State, ()

    def file_of(self, rust: tokenizers.Tokenizer) -> File:
        parts = _parts(rust)
        if self.file is None or self.parts != parts:
            self.file, self.parts = File(rust), parts
        return self.file


class Rust:
    """A rust tokenizer. Its texts and ids go to kernels where they can; all else is its own."""

    __slots__ = ("_owner", "_rust", "_state")

    def __init__(self, rust: tokenizers.Tokenizer, state: State, owner: object) -> None:
        object.__setattr__(self, "_rust", rust)
        object.__setattr__(self, "_state", state)
        object.__setattr__(self, "_owner", owner)

    def encode_batch(
        self, input: Sequence[Any], add_special_tokens: bool = True, is_pretokenized: bool = False
    ) -> list[ServedEncoding | Encoding]:
        """As the library's: an Encoding of each text or pair, truncated and padded as this tokenizer is set."""
        try:
            found: list[Any] = self._encoded(list(input), add_special_tokens, is_pretokenized)
        except HandedOver as why:
            running.count(self._owner, "tokenize", f"{OTHERWISE}: {why}")
            return list(
                self._rust.encode_batch(input, add_special_tokens=add_special_tokens, is_pretokenized=is_pretokenized)
            )
        running.count(self._owner, "tokenize")
        return found

    def encode(
        self,
        sequence: Any,
        pair: Any = None,
        is_pretokenized: bool = False,
        add_special_tokens: bool = True,
    ) -> ServedEncoding | Encoding:
        """As the library's: the Encoding of one text or pair."""
        one = sequence if pair is None else (sequence, pair)
        return self.encode_batch([one], add_special_tokens, is_pretokenized)[0]

    @property
    def decode(self) -> Callable[..., str]:
        """As the library's: (ids, skip_special_tokens=True) -> text. Or what somebody put in its place, as
        Transformers does for CLIP."""
        return self._state.decode or self._decode

    def decode_batch(self, sequences: Sequence[Any], skip_special_tokens: bool = True) -> list[str]:
        """As the library's: the text of each sequence of ids."""
        return [self._decode(ids, skip_special_tokens) for ids in sequences]

    def _decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        try:
            text = self._decoded(ids, skip_special_tokens)
        except HandedOver as why:
            running.count(self._owner, "detokenize", f"{OTHERWISE}: {why}")
            return str(self._rust.decode(ids, skip_special_tokens=skip_special_tokens))
        running.count(self._owner, "detokenize")
        return text

    def _encoded(self, texts: list[Text], with_special: bool, is_split: bool) -> list[ServedEncoding]:
        rust = self._rust
        if is_split:
            raise HandedOver("words that are split already")
        if rust.encode_special_tokens:
            raise HandedOver("split_special_tokens")
        pairs = [(one,) if isinstance(one, str) else tuple(one) for one in texts]
        flat = [text for pair in pairs for text in pair]
        if not all(len(pair) in (1, 2) for pair in pairs) or not all(isinstance(text, str) for text in flat):
            raise HandedOver("inputs that are no texts")
        if not flat:
            return []
        file = self._file()
        ids, offsets = running.connected(
            "tokenize",
            lambda: lz.tokenize(flat, file.content, add_special_tokens=False, return_offsets=True),
        )
        tokens = [file.tokens(*row) for row in zip(flat, ids, offsets, strict=True)]
        rows = iter(zip(ids, tokens, offsets, strict=True))
        found = []
        for pair in pairs:
            first, second = [raw_encoding(*next(rows), sequence) for sequence in range(len(pair))] + [None] * (
                2 - len(pair)
            )
            found.append(rust.post_process(first, second, with_special))
        padding = rust.padding
        if padding is not None and padding["length"] is None:
            _pad(found, padding)
        return [ServedEncoding(one, self._words(file, pair)) for one, pair in zip(found, pairs, strict=True)]

    def _words(self, file: File, texts: tuple[str, ...]) -> Callable[[], list[list[int | None]]]:
        @functools.cache
        def words() -> list[list[int | None]]:
            running.count(self._owner, "word ids", f"{OTHERWISE}: no kernel gives them")
            return [file.words(text) for text in texts]

        return words

    def _decoded(self, ids: Any, skip_special_tokens: bool) -> str:
        if not isinstance(ids, (list, tuple)) or not all(type(index) is int for index in ids):
            raise HandedOver("ids that are no integers")
        file = self._file()
        text: str = running.connected(
            "detokenize",
            lambda: lz.detokenize(list(ids), file.content, skip_special_tokens=bool(skip_special_tokens)),
        )
        return text

    def _file(self) -> File:
        if running.IS_DISABLED:
            raise HandedOver("LAYERZERO_DISABLE")
        model = self._rust.model
        if any(getattr(model, name, None) for name in _RANDOM):
            raise HandedOver("a model that draws at random")
        return self._state.file_of(self._rust)

    def __getattr__(self, name: str) -> Any:
        if name in _CHANGES:
            self._state.file = None
        return getattr(self._rust, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "decode":
            self._state.decode = value
            return
        self._state.file = None
        setattr(self._rust, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and files have the library's own."""
        return _same, (self._rust,)

    def __deepcopy__(self, memo: dict[int, Any]) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self._rust.to_str())

    def __repr__(self) -> str:
        return repr(self._rust)


def plain(tokenizer: Any) -> tokenizers.Tokenizer | None:
    """The library's own rust tokenizer behind one of ours."""
    return tokenizer._rust if isinstance(tokenizer, Rust) else tokenizer


def _parts(rust: tokenizers.Tokenizer) -> tuple[Any, ...]:
    """What may change without our seeing it: parts of a tokenizer have settings of their own."""
    try:
        parts = [part and part.__getstate__() for part in (rust.normalizer, rust.pre_tokenizer, rust.decoder)]
    except Exception as error:
        raise HandedOver("a part of it is written in Python") from error
    model = rust.model
    return (*parts, *(getattr(model, name, None) for name in _SETTINGS), rust.get_vocab_size(True))


def _pad(encodings: list[Encoding], padding: dict[str, Any]) -> None:
    """All to the length of the longest. Each has been padded by itself before, to a multiple where that is wanted."""
    longest = max(len(one) for one in encodings)
    for one in encodings:
        one.pad(
            longest,
            direction=padding["direction"],
            pad_id=padding["pad_id"],
            pad_type_id=padding["pad_type_id"],
            pad_token=padding["pad_token"],
        )


def _is_plain(merge: Any) -> bool:
    """Whether "a b" says it, too."""
    return not isinstance(merge, str) and not any(" " in part for part in merge) and not merge[0].startswith("#version")


def _say_prefixes(part: Any) -> None:
    """Releases differ in how a file has Metaspace's prefix. Those that write it the new way read both."""
    if not isinstance(part, dict):
        return
    for child in [*part.get("pretokenizers", ()), *part.get("decoders", ())]:
        _say_prefixes(child)
    if part.get("type") == "Metaspace" and part.get("prepend_scheme") in ("always", "never"):
        part.setdefault("add_prefix_space", part["prepend_scheme"] == "always")


def _same(value: Any) -> Any:
    return value
