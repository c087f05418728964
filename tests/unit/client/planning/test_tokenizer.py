"""client/planning/tokenizer.py: the file, and texts and ids in and out of flat buffers."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.client.planning.tokenizer import (
    TokenizerFile,
    as_texts,
    check_max_length,
    encode_ids,
    encode_texts,
    guess_text_bytes,
    guess_token_count,
    open_tokenizer,
    read_offsets,
    read_texts,
    read_token_ids,
)
from layerzero.ipc.errors import ConfigError, InvalidArgument, ProtocolError

DOCUMENT: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
}
DATA = json.dumps(DOCUMENT).encode()

texts_strategy = st.lists(st.text(st.characters(exclude_categories=["Cs"])))


def splits_of(*ends: int) -> memoryview:
    return memoryview(array("q", ends)).cast("B")


def int32s(*values: int) -> memoryview:
    return memoryview(array("i", values)).cast("B")


# --- the file


def test_a_file_is_known_by_its_bytes() -> None:
    """The digest and the format decide which kernels may serve it."""
    from layerzero.ipc.vocabulary.tokenizer_format import tokenizer_format

    file = TokenizerFile.from_bytes(DATA)
    assert (file.data, file.digest, file.format) == (
        DATA, hashlib.sha256(DATA).hexdigest(), tokenizer_format(DOCUMENT),
    )  # fmt: skip


def test_every_way_to_name_a_tokenizer_gives_the_same_file(tmp_path: Path) -> None:
    """A path, a model's folder, bytes, or a TokenizerFile made before."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(DATA)
    digests = {open_tokenizer(t).digest for t in (path, str(path), tmp_path, DATA, TokenizerFile(DATA))}
    assert digests == {hashlib.sha256(DATA).hexdigest()}


def test_a_path_is_read_again_only_when_the_file_has_changed(tmp_path: Path) -> None:
    """Vocabularies are megabytes; parsing one on every call would dwarf the call."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(DATA)
    first = open_tokenizer(path)
    assert open_tokenizer(str(path)) is first
    changed = DATA.replace(b'"a"', b'"b"')
    path.write_bytes(changed)
    os.utime(path, ns=(1, 1))
    assert open_tokenizer(path).data == changed


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", r"tokenizer: not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no 'model' object"),
        (b'{"model": 1}', "no 'model' object"),
    ],
)
def test_bytes_that_are_no_tokenizer_are_refused(data: bytes, says: str) -> None:
    """Here, and not in a worker that would be blamed for it."""
    with pytest.raises(ConfigError, match=says):
        open_tokenizer(data)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Also when a folder lacks its tokenizer.json."""
    for path in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(ConfigError, match=f"{tmp_path}/.*json' cannot be read: No such file"):
            open_tokenizer(path)


def test_other_objects_are_no_tokenizers() -> None:
    """Tokenizer objects of other libraries cannot cross."""
    with pytest.raises(InvalidArgument, match=r"tokenizer is int; allowed: lz\.TokenizerFile, a path"):
        open_tokenizer(3)  # type: ignore[arg-type]


# --- texts


@given(texts_strategy)
def test_texts_survive_the_flat_form(texts: list[str]) -> None:
    """Empty texts and texts of several bytes per character included."""
    data, splits = encode_texts(texts)
    assert (len(splits), splits[-1], splits.itemsize) == (len(texts) + 1, len(data), 8)
    assert read_texts(memoryview(data + b"room"), memoryview(splits)) == texts


def test_no_text_and_the_empty_text_differ() -> None:
    """An empty batch has no result, the empty text has an empty one."""
    assert [encode_texts(t) for t in ([], [""])] == [(b"", array("q", [0])), (b"", array("q", [0, 0]))]


def test_a_single_text_is_told_from_a_batch() -> None:
    """Its result is not put in a list. A text is itself a sequence of str, one per character."""
    assert [as_texts(t) for t in ("ab", ["ab"], ("a", "b"))] == [(("ab",), True), (["ab"], False), (("a", "b"), False)]


@pytest.mark.parametrize("text", [b"ab", bytearray(b"ab"), 3, None, {"a": 1}])
def test_what_is_not_text_is_refused(text: Any) -> None:
    """bytes would be tokenized as a sequence of integers."""
    with pytest.raises(InvalidArgument, match=f"text is {type(text).__name__}; allowed: str or a sequence of str"):
        as_texts(text)


def test_a_batch_with_something_else_in_it_names_the_place() -> None:
    """Batches are long."""
    with pytest.raises(InvalidArgument, match="text 1 is bytes; allowed: str"):
        encode_texts(["a", b"b"])  # type: ignore[list-item]


def test_lone_surrogates_are_refused_by_place() -> None:
    """They come from os.fsdecode and broken JSON, and UTF-8 cannot hold them."""
    with pytest.raises(InvalidArgument, match=r"text 1 has the lone surrogate U\+DC80 at position 2"):
        encode_texts(["ok", "ab\udc80"])


def test_max_length_is_a_positive_int() -> None:
    """True is 1 to Python, and 0 leaves no room for special tokens."""
    assert [check_max_length(n) for n in (None, 1, 2**31 - 1)] == [None, 1, 2**31 - 1]
    for wrong in (0, -1, True, 1.0, "3", 2**31):
        with pytest.raises(InvalidArgument, match="max_length is"):
            check_max_length(wrong)


# --- ids


def test_ids_are_split_by_text_and_room_is_ignored() -> None:
    """Buffers are larger than what was written."""
    assert read_token_ids(int32s(1, 2, 3, 99, 99), splits_of(0, 2, 2, 3)) == [[1, 2], [], [3]]
    assert read_token_ids(int32s(), splits_of(0, 0)) == [[]]
    assert read_token_ids(int32s(9), splits_of(0)) == []


def test_offsets_are_split_by_text() -> None:
    """Character positions within each text."""
    offsets = int32s(0, 1, 1, 4, 0, 2, 9, 9)
    assert read_offsets(offsets, splits_of(0, 2, 3)) == [[(0, 1), (1, 4)], [(0, 2)]]


@pytest.mark.parametrize("ends", [(), (1, 2), (0, 2, 1), (0, 4), (0, -1), (0, 2**62)])
def test_split_points_of_a_worker_are_not_trusted(ends: tuple[int, ...]) -> None:
    """Wrong ones would hand out another call's bytes."""
    for read in (read_token_ids, read_texts, read_offsets):
        with pytest.raises(ProtocolError, match="split points must rise from 0 to at most"):
            read(int32s(1, 2, 3)[: {read_texts: 3, read_offsets: 12}.get(read, 12)], splits_of(*ends))


def test_text_that_is_not_utf8_is_a_protocol_error() -> None:
    """Another backend may do better."""
    with pytest.raises(ProtocolError, match="not UTF-8"):
        read_texts(memoryview(b"a\xff"), splits_of(0, 2))


@given(st.lists(st.lists(st.integers(0, 2**31 - 1)), min_size=1))
def test_id_batches_survive_the_flat_form(batch: list[list[int]]) -> None:
    """encode_ids is the inverse of read_token_ids."""
    flat, splits, is_single = encode_ids(batch)
    assert (flat.itemsize, splits.itemsize, is_single) == (4, 8, False)
    assert read_token_ids(memoryview(flat), memoryview(splits)) == batch


def test_ids_come_in_many_forms() -> None:
    """What tokenize returns, and arrays of one or two dimensions."""
    np = pytest.importorskip("numpy")
    single = (array("i", [1, 2]), array("q", [0, 2]), True)
    batch = (array("i", [1, 2]), array("q", [0, 1, 2]), False)
    for ids in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), array("q", [1, 2]), [np.int64(1), 2]):
        assert encode_ids(ids) == single
    for ids in ([[1], [2]], np.array([[1], [2]]), [np.array([1]), (2,)]):
        assert encode_ids(ids) == batch
    assert encode_ids([]) == (array("i"), array("q", [0, 0]), True)
    assert encode_ids([[]]) == (array("i"), array("q", [0, 0]), False)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1, -1], r"ids\[1\] is -1; allowed: token ids, integers of 0 to 2147483647"),
        ([2**31], r"ids\[0\] is 2147483648"),
        ([[1], [2, 10**30]], r"ids\[1\]\[1\] is 10000"),
        ([1, 2.5], r"ids\[1\] is 2\.5"),
        ([1, [2]], r"ids\[1\] is \[2\]"),
        ([[1], 2], r"ids\[1\] is int; allowed: a sequence"),
        ([1.0], r"ids\[0\] is float"),
        ("12", "ids is str"),
        (["12"], r"ids\[0\] is str"),
        (3, "ids is int"),
        ([[[1]]], r"ids\[0\]\[0\] is \[1\]"),
    ],
)
def test_ids_that_cannot_be_tokens_are_refused_by_place(ids: Any, says: str) -> None:
    """A negative or too large id would wrap around to another token."""
    with pytest.raises(InvalidArgument, match=says):
        encode_ids(ids)


# --- room


def test_guesses_are_generous_and_coarse() -> None:
    """Enough for byte-level models, few distinct sizes, and no more than max_length allows."""
    assert guess_token_count(0, 0) == 64
    assert guess_token_count(1000, 4) == 2048
    assert guess_token_count(1_000_000, 4, max_length=128) == 512
    assert guess_text_bytes(100, 1) == 1024
