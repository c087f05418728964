"""Bytes and two merges on one text, and back."""

from typing import Any


def op(memory: Any) -> tuple[list[Any], list[Any]]:
    import tiktoken

    ranks = {**{bytes([byte]): byte for byte in range(256)}, b"sh": 256, b"are": 258, b"ar": 257}
    encoding = tiktoken.Encoding("probe", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    ids = encoding.encode_ordinary("share me")
    return [*ids, encoding.decode(ids)], [256, 258, 32, 109, 101, "share me"]
