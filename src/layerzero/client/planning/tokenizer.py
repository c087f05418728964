"""tokenizer.json files, and texts and token ids to and from the flat buffers in which they cross."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

from layerzero.ipc.errors import ConfigError, InvalidArgument, ProtocolError

MAX_ID = 2**31 - 1
FILE_NAME = "tokenizer.json"


class TokenizerFile:
    """A tokenizer.json: its bytes, their SHA-256, the file format that a kernel must be able to read, and in `attrs`
    these two and the hashes of its parts, as calls say them.

    Make it once and pass it to each call: a path costs a stat per call, bytes cost a hash.
    """

    __slots__ = ("__weakref__", "attrs", "data", "digest", "format", "name")

    def __init__(self, data: bytes, name: str = "tokenizer") -> None:
        """Raises ConfigError when the bytes are no tokenizer.json."""
        from layerzero.client.planning.kept_libraries import KeptLibraries
        from layerzero.ipc.vocabulary.tokenizer_format import tokenizer_format
        from layerzero.ipc.vocabulary.tokenizer_identity import tokenizer_parts

        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as exc:  # UnicodeDecodeError is a ValueError
            raise ConfigError(
                f"{name}: not JSON ({exc!s:.200}); pass a tokenizer.json of the tokenizers library"
            ) from exc
        if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
            raise ConfigError(f"{name}: no 'model' object in it; pass a tokenizer.json of the tokenizers library")
        self.data = data
        self.name = name
        self.digest = hashlib.sha256(data).hexdigest()
        self.format = tokenizer_format(document)
        self.attrs = {
            "tokenizer_digest": self.digest,
            "tokenizer_format": self.format,
            **tokenizer_parts(document, self.digest, KeptLibraries()),
        }

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> TokenizerFile:
        return _from_bytes(bytes(data))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> TokenizerFile:
        """Read a tokenizer.json, or the one in a model's folder. Read again only when the file has changed."""
        file = Path(path)
        try:
            if file.is_dir():
                file = file / FILE_NAME
            stat = file.stat()
            return _from_file(str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        except OSError as exc:
            raise ConfigError(
                f"tokenizer {str(file)!r} cannot be read: {exc.strerror}; pass the path of a {FILE_NAME}"
            ) from exc

    def __repr__(self) -> str:
        return f"TokenizerFile({self.name!r}, format={self.format!r}, sha256={self.digest[:12]})"


@functools.lru_cache(maxsize=16)
def _from_bytes(data: bytes) -> TokenizerFile:
    return TokenizerFile(data)


@functools.lru_cache(maxsize=16)
def _from_file(path: str, *_version: int) -> TokenizerFile:
    return TokenizerFile(Path(path).read_bytes(), path)


def open_tokenizer(tokenizer: TokenizerFile | str | os.PathLike[str] | bytes) -> TokenizerFile:
    """What the ops take as `tokenizer`: a TokenizerFile, a path, or the bytes of a tokenizer.json."""
    match tokenizer:
        case TokenizerFile():
            return tokenizer
        case bytes() | bytearray() | memoryview():
            return TokenizerFile.from_bytes(tokenizer)
        case str() | os.PathLike():
            return TokenizerFile.from_file(tokenizer)
    raise InvalidArgument(
        f"tokenizer is {type(tokenizer).__name__}; allowed: lz.TokenizerFile, a path to a {FILE_NAME}, or its bytes"
    )


# --- tokenize


def as_texts(text: str | Sequence[str]) -> tuple[Sequence[str], bool]:
    """The texts of a call, and whether it was a single one, whose result is not in a list."""
    if isinstance(text, str):
        return (text,), True
    if isinstance(text, (bytes, bytearray, memoryview)) or not isinstance(text, Sequence):
        raise InvalidArgument(f"text is {type(text).__name__}; allowed: str or a sequence of str; decode bytes first")
    return text, False


def encode_texts(texts: Sequence[str]) -> tuple[bytes, array[int]]:
    """UTF-8 of all texts, one after the other, and the n+1 byte offsets between them as int64."""
    parts = []
    splits = array("q", [0])
    end = 0
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidArgument(f"text {index} is {type(text).__name__}; allowed: str")
        try:
            part = text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidArgument(
                f"text {index} has the lone surrogate U+{ord(text[exc.start]):04X} at position {exc.start}; allowed: "
                "text that UTF-8 can hold; repair it, for instance with text.encode('utf-8', 'replace').decode()"
            ) from exc
        parts.append(part)
        end += len(part)
        splits.append(end)
    return b"".join(parts), splits


def check_max_length(max_length: object) -> int | None:
    if max_length is None:
        return None
    if isinstance(max_length, bool) or not isinstance(max_length, Integral) or not 1 <= int(max_length) <= MAX_ID:
        raise InvalidArgument(f"max_length is {max_length!r}; allowed: None, or 1 to {MAX_ID} tokens per text")
    return int(max_length)


def guess_token_count(text_bytes: int, texts: int, max_length: int | None = None) -> int:
    """Room for ids that suffices for nearly all calls: a token per byte and a few special ones per text.

    A power of two, so that calls of similar size look alike to the broker.
    """
    count = text_bytes + 8 * texts
    if max_length is not None:
        count = min(count, max_length * texts)
    return _power_of_two(count)


def read_token_ids(ids: memoryview, splits: memoryview) -> list[list[int]]:
    """The ids of each text. `splits`: all n+1 int64 split points; `ids`: int32, as many as they say or more."""
    ends = _checked_splits(splits, len(ids.cast("B")) // 4)
    flat = ids.cast("B").cast("i")[: ends[-1]].tolist()
    return [flat[start:end] for start, end in pairwise(ends)]


def read_offsets(offsets: memoryview, splits: memoryview) -> list[list[tuple[int, int]]]:
    """The (start, end) character positions of each token in its text. `offsets` (n, 2) int32, or longer."""
    ends = _checked_splits(splits, len(offsets.cast("B")) // 8)
    flat = offsets.cast("B").cast("i")[: 2 * ends[-1]].tolist()
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    return [pairs[start:end] for start, end in pairwise(ends)]


# --- detokenize


def encode_ids(ids: Any) -> tuple[array[int], array[int], bool]:
    """Token ids as int32, the n+1 int64 positions between the sequences, and whether it was a single one.

    ids: a sequence of integers, a sequence of such sequences, or an array with `tolist()` of 1 or 2 dimensions.
    An empty sequence is a single one.
    """
    ids = _as_list(ids, "ids")
    is_single = not ids or isinstance(ids[0], Integral)
    flat, splits = array("i"), array("q", [0])
    for index, sequence in enumerate([ids] if is_single else ids):
        name = "ids" if is_single else f"ids[{index}]"
        values = _as_list(sequence, name)
        _extend(flat, values, name)
        splits.append(len(flat))
    return flat, splits, is_single


def guess_text_bytes(ids: int, sequences: int) -> int:
    """Room for text that suffices for most calls. A power of two, as above."""
    return _power_of_two(8 * ids + 16 * sequences)


def read_texts(text: memoryview, splits: memoryview) -> list[str]:
    """The texts between the int64 byte positions in `splits`."""
    data = text.cast("B")
    ends = _checked_splits(splits, len(data))
    try:
        return [str(data[start:end], "utf-8") for start, end in pairwise(ends)]
    except UnicodeDecodeError as exc:
        raise ProtocolError(f"detokenize returned bytes that are not UTF-8: {exc}") from exc


def _as_list(value: Any, name: str) -> list[Any]:
    if isinstance(value, list):
        return value
    to_list = getattr(value, "tolist", None)  # NumPy, torch, JAX, array.array
    if to_list is not None:
        value = to_list()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidArgument(
            f"{name} is {type(value).__name__}; allowed: a sequence of token ids, or a sequence of such sequences"
        )
    return list(value)


def _extend(flat: array[int], values: list[Any], name: str) -> None:
    try:
        more = array("i", values)
    except (OverflowError, TypeError):
        more = None
    if more is None or (more and min(more) < 0):
        position, wrong = next(
            (i, v) for i, v in enumerate(values) if not isinstance(v, Integral) or not 0 <= int(v) <= MAX_ID
        )
        raise InvalidArgument(f"{name}[{position}] is {wrong!r:.80}; allowed: token ids, integers of 0 to {MAX_ID}")
    flat.extend(more)


def _checked_splits(splits: memoryview, limit: int) -> list[int]:
    """Split points as a worker wrote them. Raises ProtocolError: slicing by wrong ones would show other bytes."""
    ends: list[int] = splits.cast("B").cast("q").tolist()
    if not ends or ends[0] != 0 or ends[-1] > limit or any(a > b for a, b in pairwise(ends)):
        raise ProtocolError(f"split points must rise from 0 to at most {limit}, got {ends!r:.200}")
    return ends


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 63).bit_length()
