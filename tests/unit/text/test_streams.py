"""Texts that come token by token. Tokens here are bytes, the hardest case: each character is one to four of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero import InvalidArgument
from layerzero.text import DetokenizeStream, DetokenizeStreams


def of_bytes(sequences: list[list[int]]) -> list[str]:
    return [bytes(ids).decode(errors="replace") for ids in sequences]


def in_words(sequences: list[list[int]]) -> list[str]:
    """As decoders of words do: no blank before the first one."""
    return [" ".join(f"w{n}" for n in ids) for ids in sequences]


@given(st.text(max_size=40))
def test_a_stream_gives_the_text_and_never_half_a_character(text: str) -> None:
    stream = DetokenizeStream(of_bytes)
    parts = [stream.add(byte) for byte in text.encode()]
    assert "".join(parts) + stream.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


def test_what_a_token_says_may_depend_on_the_one_before() -> None:
    stream = DetokenizeStream(in_words)
    assert [stream.add(n) for n in range(4)] == ["w0", " w1", " w2", " w3"]
    assert stream.finish() == ""


def test_bytes_that_are_no_character_are_not_waited_for_without_end() -> None:
    stream = DetokenizeStream(of_bytes)
    parts = [stream.add(0xFF) for _ in range(40)]
    assert any(parts[:20])
    assert "".join(parts) + stream.finish() == "\ufffd" * 40


def test_a_stream_that_ends_within_a_character_gives_what_there_is_and_begins_anew() -> None:
    stream = DetokenizeStream(of_bytes)
    assert [stream.add("é".encode()[0]), stream.finish()] == ["", "\ufffd"]
    assert stream.add(list("é".encode())) == "é"


def test_a_window_stays_as_short_as_a_character() -> None:
    seen: list[int] = []

    def note(sequences: list[list[int]]) -> list[str]:
        seen.append(max(map(len, sequences)))
        return of_bytes(sequences)

    stream = DetokenizeStream(note)
    for byte in ("a" * 500 + "\N{SNOWMAN}" * 500).encode():
        stream.add(byte)
    assert max(seen) <= 6


def test_streams_go_side_by_side_with_one_call_a_step() -> None:
    calls: list[int] = []

    def note(sequences: list[list[int]]) -> list[str]:
        calls.append(len(sequences))
        return of_bytes(sequences)

    streams = DetokenizeStreams(note, 3)
    assert streams.add([ord("a"), [*b"bc"], None]) == ["a", "bc", ""]
    assert streams.add([None, "é".encode()[0], ord("z")]) == ["", "", "z"]
    assert streams.add([None, None, None]) == ["", "", ""]
    assert streams.finish() == ["", "\ufffd", ""]
    assert calls == [4, 4, 2]


def test_what_is_wrong_with_the_arguments() -> None:
    with pytest.raises(InvalidArgument, match="count is 0; allowed: 1 or more"):
        DetokenizeStreams(of_bytes, 0)
    with pytest.raises(InvalidArgument, match="ids has 1 items; allowed: 2, one for each sequence"):
        DetokenizeStreams(of_bytes, 2).add([1])
