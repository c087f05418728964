"""Ops on text: tokenize and detokenize. docs/ops.md has what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from layerzero.client.connection.arena_registry import lend_bytes
from layerzero.client.connection.call import Request
from layerzero.client.facade.running import perform_sized
from layerzero.client.planning import plans
from layerzero.client.planning import tokenizer as texts
from layerzero.ipc.vocabulary.tensors import TensorSpec


def tokenize(
    text: str | Sequence[str],
    tokenizer: Any,
    *,
    add_special_tokens: bool = True,
    max_length: int | None = None,
    return_offsets: bool = False,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Any:
    """Token ids of a text, or a list of them for a sequence of texts.

    tokenizer: an lz.TokenizerFile, or the path or bytes of a tokenizer.json. max_length: truncate each text to so
    many tokens, special ones included. return_offsets: returns (ids, offsets), offsets being (start, end) character
    positions of each token.
    """
    file = texts.open_tokenizer(tokenizer)
    items, is_single = texts.as_texts(text)
    data, splits = texts.encode_texts(items)
    max_length = texts.check_max_length(max_length)
    params = {
        **file.attrs,
        "add_special_tokens": bool(add_special_tokens),
        "max_length": max_length,
        "return_offsets": bool(return_offsets),
    }
    room = texts.guess_token_count(len(data), len(items), max_length)

    def make(ids: int, ends: int, offsets: int) -> Request:
        sizes = (4 * ids, 8 * ends, 8 * offsets)
        return Request(
            "tokenize",
            (lend_bytes(file, file.data), data, splits),
            params,
            _sized_plan("tokenize", ("int32", "int64", "int32"), ((0,), (0,), (0, 2))),
            None,
            backend,
            timeout_s,
            sizes,
            lambda outputs, _: outputs,
        )

    outputs = perform_sized(make, (room, len(items) + 1, room if return_offsets else 0))
    if not isinstance(outputs, list):  # an explanation
        return outputs
    ids = texts.read_token_ids(outputs[0], outputs[1])
    if not return_offsets:
        return ids[0] if is_single else ids
    offsets = texts.read_offsets(outputs[2], outputs[1])
    return (ids[0], offsets[0]) if is_single else (ids, offsets)


def detokenize(
    ids: Any,
    tokenizer: Any,
    *,
    skip_special_tokens: bool = True,
    backend: str | None = None,
    timeout_s: float | None = None,
) -> Any:
    """The text of a sequence of token ids, or a list of texts for a sequence of sequences (or a 2-D array)."""
    file = texts.open_tokenizer(tokenizer)
    flat, splits, is_single = texts.encode_ids(ids)
    params = {
        **file.attrs,
        "skip_special_tokens": bool(skip_special_tokens),
    }

    def make(nbytes: int, ends: int) -> Request:
        return Request(
            "detokenize",
            (lend_bytes(file, file.data), flat, splits),
            params,
            _sized_plan("detokenize", ("uint8", "int64"), ((0,), (0,))),
            None,
            backend,
            timeout_s,
            (nbytes, 8 * ends),
            lambda outputs, _: outputs,
        )

    outputs = perform_sized(make, (texts.guess_text_bytes(len(flat), len(splits) - 1), len(splits)))
    if not isinstance(outputs, list):
        return outputs
    found = texts.read_texts(outputs[0], outputs[1])
    return found[0] if is_single else found


def _sized_plan(op: str, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> Callable[..., plans.Plan]:
    outputs = tuple(TensorSpec.contiguous(d, s) for d, s in zip(dtypes, shapes, strict=True))

    def plan(*inputs: TensorSpec | None, **attrs: Any) -> plans.Plan:
        return plans.Plan(op, inputs, attrs, outputs, ())

    return plan
