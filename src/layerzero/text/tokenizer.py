"""A tokenizer of a model's folder, for whole batches, streams and chats."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import layerzero as lz
from layerzero import ConfigError, InvalidArgument
from layerzero.text.cache import CacheInfo, TokenCache, Tokens
from layerzero.text.chat import CONFIG_FILE, DEFAULT, FOR_TOOLS, ChatTemplate, templates_of
from layerzero.text.padding import SIDES, TokenBatch, padded, width_of
from layerzero.text.streams import DetokenizeStream, DetokenizeStreams

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PADDING = ("longest", "max_length")


class Tokenizer:
    """Tokenizer of a tokenizer.json, with what a model's folder says besides: special tokens and chat templates.

    special_tokens: the texts of bos_token, eos_token, pad_token and their like, as far as they are known.
    file: the lz.TokenizerFile, for lz.tokenize.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | bytes | lz.TokenizerFile,
        *,
        pad_token: str | None = None,
        chat_template: str | None = None,
        cache_nbytes: int = 0,
        backend: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """source: the folder of a model, the path of a tokenizer.json, its bytes, or an lz.TokenizerFile. pad_token,
        chat_template: instead of the folder's. cache_nbytes: tokens of texts are kept in this process up to so many
        bytes, those that were used last. backend, timeout_s: of each call, as lz.tokenize has them.

        Raises ConfigError: the file or the folder's configuration cannot be read, or has no such token."""
        if cache_nbytes < 0:
            raise InvalidArgument(f"cache_nbytes is {cache_nbytes}; allowed: 0 for no cache, or more")
        folder = Path(source) if isinstance(source, (str, os.PathLike)) else None
        if folder is not None and not folder.is_dir():
            folder = folder.parent if folder.name == "tokenizer.json" else None
        self.file = _file(source)
        document = json.loads(self.file.data)
        config = _config(folder)
        self._added = {str(one["content"]): int(one["id"]) for one in document.get("added_tokens") or []}
        self._vocab = document["model"].get("vocab")
        self._special_ids = frozenset(
            int(one["id"]) for one in document.get("added_tokens") or [] if one.get("special")
        )
        self.special_tokens = {
            name: text for name in SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None
        }
        if pad_token is not None:
            self.special_tokens["pad_token"] = pad_token
        self._pad_id = self._find_pad_id(document)
        self._templates = templates_of(folder, config) if folder is not None else {}
        if chat_template is not None:
            self._templates = {DEFAULT: chat_template}
        self._compiled: dict[str, ChatTemplate] = {}
        self._cache = TokenCache(cache_nbytes) if cache_nbytes else None
        self._backend, self._timeout_s = backend, timeout_s

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        padding: str = "longest",
        max_length: int | None = None,
        padding_side: str = "right",
        pad_to_multiple_of: int = 1,
        add_special_tokens: bool = True,
        return_offsets: bool = False,
        dtype: Any = "int64",
    ) -> TokenBatch:
        """Batch of texts, padded.

        texts: N of them; one text is a batch of one. padding: "longest": as wide as the longest text; "max_length": as
        wide as max_length. max_length: each text is cut to so many tokens, special ones included. padding_side: "right"
        or "left". pad_to_multiple_of: the width is a multiple of it. dtype: of the arrays, a name or a NumPy dtype for
        NumPy arrays, a torch.dtype for tensors.

        Raises InvalidArgument; ConfigError, where padding is needed and no token for it is known."""
        _check(padding, max_length, padding_side, pad_to_multiple_of)
        items = [texts] if isinstance(texts, str) else list(texts)
        tokens, cached = self._tokens(items, add_special_tokens, max_length, return_offsets)
        lengths = tuple(len(one.ids) for one in tokens)
        least = max_length if padding == "max_length" and max_length is not None else 0
        width = width_of(lengths, least, pad_to_multiple_of)
        if self._pad_id is None and any(length < width for length in lengths):
            raise ConfigError(
                f"{self.file.name} has no token for padding, and these texts differ in length; "
                "pass pad_token=, for instance that of the end"
            )
        ids, mask, special = padded(
            [one.ids for one in tokens],
            width=width,
            pad_id=self._pad_id or 0,
            side=padding_side,
            special_ids=self._special_ids,
            dtype=dtype,
        )
        offsets = tuple(tuple(zip(one.offsets[::2], one.offsets[1::2], strict=True)) for one in tokens)
        return TokenBatch(ids, mask, special, lengths, offsets if return_offsets else None, cached)

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> Any:
        """Text of a sequence of ids, or texts of several, as lz.detokenize gives them."""
        return lz.detokenize(
            ids, self.file, skip_special_tokens=skip_special_tokens, backend=self._backend, timeout_s=self._timeout_s
        )

    def stream(self, *, skip_special_tokens: bool = True) -> DetokenizeStream:
        """Stream of one answer's text, token by token."""
        return DetokenizeStream(lambda ids: self._texts(ids, skip_special_tokens))

    def streams(self, count: int, *, skip_special_tokens: bool = True) -> DetokenizeStreams:
        """Streams of `count` answers that grow side by side, with one call for each step of all."""
        return DetokenizeStreams(lambda ids: self._texts(ids, skip_special_tokens), count)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, template: str | None = None, **options: Any) -> str:
        """Text of a chat by the folder's template; options are those of ChatTemplate.render.

        It has its special tokens, so tokenize it with add_special_tokens=False. template: the name of one of several;
        unasked it is "default", or "tool_use" where there is one and `tools` are passed."""
        name = template or (FOR_TOOLS if options.get("tools") and FOR_TOOLS in self._templates else DEFAULT)
        source = self._templates.get(name)
        if source is None:
            known = ", ".join(sorted(self._templates)) or "none"
            raise ConfigError(f"{self.file.name} has no chat template {name!r}, only: {known}; pass chat_template=")
        compiled = self._compiled.get(name)
        if compiled is None:
            compiled = self._compiled[name] = ChatTemplate(source, self.special_tokens)
        return compiled.render(messages, **options)

    def cache_info(self) -> CacheInfo:
        """What the cache has; all zero without one."""
        return self._cache.info() if self._cache is not None else CacheInfo(0, 0, 0, 0, 0)

    def _tokens(
        self, texts: list[str], add_special_tokens: bool, max_length: int | None, return_offsets: bool
    ) -> tuple[list[Tokens], int]:
        """The tokens of each text, and how many texts came from the cache. One call for all others."""
        keys = [(text, bool(add_special_tokens), max_length, bool(return_offsets)) for text in texts]
        cache = self._cache
        found = [cache.find(key) if cache is not None and isinstance(key[0], str) else None for key in keys]
        missing = [n for n, one in enumerate(found) if one is None]
        if missing:
            answer = lz.tokenize(
                [texts[n] for n in missing],
                self.file,
                add_special_tokens=add_special_tokens,
                max_length=max_length,
                return_offsets=return_offsets,
                backend=self._backend,
                timeout_s=self._timeout_s,
            )
            ids, offsets = answer if return_offsets else (answer, [()] * len(missing))
            for n, row, places in zip(missing, ids, offsets, strict=True):
                found[n] = tokens = Tokens(array("i", row), array("i", chain.from_iterable(places)))
                if cache is not None:
                    cache.add(keys[n], tokens)
        return [one for one in found if one is not None], len(texts) - len(missing)

    def _texts(self, ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        texts: list[str] = self.decode(ids, skip_special_tokens=skip_special_tokens)
        return texts

    def _find_pad_id(self, document: Mapping[str, Any]) -> int | None:
        text = self.special_tokens.get("pad_token")
        if text is None:
            padding = document.get("padding")
            return int(padding["pad_id"]) if isinstance(padding, Mapping) and "pad_id" in padding else None
        found = self._added.get(text)
        if found is None and isinstance(self._vocab, Mapping):
            found = self._vocab.get(text)
        if found is None:
            raise ConfigError(f"{self.file.name} has no token {text!r}, which is to be the pad_token")
        return int(found)


def _check(padding: str, max_length: int | None, side: str, multiple: int) -> None:
    if padding not in PADDING:
        raise InvalidArgument(f"padding is {padding!r}; allowed: {' or '.join(PADDING)}; lz.tokenize pads nothing")
    if padding == "max_length" and max_length is None:
        raise InvalidArgument('padding="max_length" needs max_length=')
    if side not in SIDES:
        raise InvalidArgument(f"padding_side is {side!r}; allowed: {' or '.join(SIDES)}")
    if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
        raise InvalidArgument(f"pad_to_multiple_of is {multiple!r}; allowed: 1 or more")


def _file(source: str | os.PathLike[str] | bytes | lz.TokenizerFile) -> lz.TokenizerFile:
    if isinstance(source, lz.TokenizerFile):
        return source
    return lz.TokenizerFile.from_bytes(source) if isinstance(source, bytes) else lz.TokenizerFile.from_file(source)


def _config(folder: Path | None) -> Mapping[str, Any]:
    """tokenizer_config.json of a folder, {} where there is none."""
    if folder is None or not (folder / CONFIG_FILE).is_file():
        return {}
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{folder / CONFIG_FILE} cannot be read: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / CONFIG_FILE} is no JSON object")
    return config


def _token_text(value: Any) -> str | None:
    """A special token's text: configurations have it as it is, or within an object."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None
