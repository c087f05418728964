"""Paged caches through the public API, by the backends of an ordinary installation: what a decoder does with them, step
by step, gives what one call of attention over all its tokens gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests import reference

import layerzero as lz

pytestmark = [pytest.mark.usefixtures("installation"), pytest.mark.timeout(1200)]
BLOCKS, PAGE, HEADS, KV_HEADS, DIM = 24, 8, 4, 2, 16
LENGTHS = np.array([37, 5, 21], np.int32)  # of the sequences, all their tokens
TABLES = np.random.default_rng(7).permutation(BLOCKS)[: 3 * 5].reshape(3, 5).astype(np.int32)


def numbers(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tokens(parts: list[Any], starts: Any, stops: Any) -> Any:
    """Some of the tokens of each sequence, one sequence after the other."""
    return np.concatenate([part[a:b] for part, a, b in zip(parts, starts, stops, strict=True)])


def ends(counts: Any) -> Any:
    return np.cumsum([0, *counts]).astype(np.int32)


def slots(starts: Any, stops: Any) -> Any:
    places = [(b, j) for b in range(3) for j in range(starts[b], stops[b])]
    return np.array([TABLES[b, j // PAGE] * PAGE + j % PAGE for b, j in places], np.int64)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("options", [{}, {"window_size": (9, -1), "softcap": 2.0}], ids=["plain", "window and cap"])
def test_chunks_of_a_prompt_give_what_the_whole_gives(kv_layout: str, options: dict[str, Any]) -> None:
    """Prefill in chunks, each appended to a cache that holds what came before; then by parts, merged: the prefix in the
    cache, which is not causal, and the chunk itself."""
    q, k, v = (
        [numbers(10 * n + b, length, h, DIM) for b, length in enumerate(LENGTHS)] for n, h in enumerate((4, 2, 2))
    )
    shape = (BLOCKS, PAGE, KV_HEADS, DIM) if kv_layout == "NHD" else (BLOCKS, KV_HEADS, PAGE, DIM)
    caches = [lz.empty(shape) for _ in "kv"]
    for cache in caches:
        cache[...] = np.nan
    whole = [
        reference.attention_forward(
            *(one.swapaxes(0, 1)[None] for one in (q[b], k[b], v[b])),
            is_causal=True,
            scale=DIM**-0.5,
            causal_alignment="bottom_right",
            **({"window_left": 9, "softcap": 2.0} if options else {}),
        )
        for b in range(3)
    ]
    wanted = [(out[0].swapaxes(0, 1), lse[0].T) for out, lse in whole]
    before = np.zeros(3, np.int32)
    for chunk in (16, 1, 20):
        after = np.minimum(before + chunk, LENGTHS).astype(np.int32)
        rows, counts = tokens(q, before, after), after - before
        new = tokens(k, before, after), tokens(v, before, after)
        prefix = None
        if not options:  # a part of the keys has no window of its own
            prefix = lz.paged_attention_forward(rows, *caches, TABLES, before, ends(counts), kv_layout=kv_layout)
        lz.append_kv(*new, *caches, slots(before, after), kv_layout=kv_layout)
        found = lz.paged_attention_forward(
            rows, *caches, TABLES, after, ends(counts), is_causal=True, kv_layout=kv_layout, **options
        )
        report = lz.last_report()
        assert report is not None
        assert not {copy.arg for copy in report.copies} & {"k_cache", "v_cache"}
        made = [found]
        if prefix is not None:
            own = lz.attention_varlen_forward(rows, *new, ends(counts), ends(counts), is_causal=True)
            made.append(lz.merge_attention(*prefix, *own))
        for out, lse in made:
            for number, one in enumerate((out, lse)):
                expected = tokens([pair[number] for pair in wanted], before, after)
                assert reference.error(np.asarray(one, np.float64), expected) <= 1e-5
        before = after


def test_a_query_each_is_paged_attention() -> None:
    """A step of decoding, by either op and in either layout."""
    q, caches = numbers(1, 3, HEADS, DIM), [numbers(n, BLOCKS, PAGE, KV_HEADS, DIM) for n in (2, 3)]
    wanted = reference.paged_attention(q, *caches, TABLES, LENGTHS, scale=0.25)
    turned = [np.ascontiguousarray(cache.swapaxes(1, 2)) for cache in caches]
    for layout, (k, v) in (("NHD", caches), ("HND", turned)):
        out, _ = lz.paged_attention_forward(q, k, v, TABLES, LENGTHS, is_causal=True, scale=0.25, kv_layout=layout)
        plain = lz.paged_attention(q, k, v, TABLES, LENGTHS, scale=0.25, kv_layout=layout)
        assert max(reference.error(np.asarray(one, np.float64), wanted) for one in (out, plain)) <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_latent_decoding_is_attention_to_the_keys_and_values_that_it_does_not_make(dtype: str) -> None:
    """DeepSeek-V2's attention as its paper writes it, eq. 9 to 19: keys and values of each head made of the latent
    vectors of all tokens. Absorbed, the latent vectors themselves are keys and values; split in two, merged."""
    latent, nope, rope, value = 32, 12, 8, 10
    up_k, up_v = numbers(1, HEADS, nope, latent) / 4, numbers(2, HEADS, value, latent)
    q_nope, q_pe = numbers(3, 3, HEADS, nope), numbers(4, 3, HEADS, rope).astype(dtype)
    absorbed = np.einsum("bhn,hnc->bhc", q_nope, up_k).astype(dtype)
    ckv, kpe = (lz.empty((BLOCKS, PAGE, extent), dtype) for extent in (latent, rope))
    rows = [
        (numbers(5 + b, n, latent).astype(dtype), numbers(9 + b, n, rope).astype(dtype)) for b, n in enumerate(LENGTHS)
    ]
    for cache in (ckv, kpe):
        cache[...] = np.nan
    # One head of a cache is what heads share: append_kv fills latent caches.
    new = [np.concatenate(part)[:, None] for part in zip(*rows, strict=True)]
    lz.append_kv(*new, ckv[:, :, None], kpe[:, :, None], slots(np.zeros(3, int), LENGTHS))
    scale = (nope + rope) ** -0.5
    wanted = []
    for b, (of_latent, of_rope) in enumerate(rows):
        keys = np.einsum("tc,hnc->htn", of_latent.astype(np.float64), up_k)
        values = np.einsum("tc,hvc->htv", of_latent.astype(np.float64), up_v)
        scores = np.einsum("hn,htn->ht", q_nope[b], keys) + q_pe[b].astype(np.float64) @ of_rope.T
        weights = np.exp(scores * scale)
        wanted.append(np.einsum("ht,htv->hv", weights / weights.sum(-1, keepdims=True), values))
    given = (absorbed, q_pe, ckv, kpe)
    found = lz.mla_decode(*given, TABLES, LENGTHS, scale=scale)
    report = lz.last_report()
    assert report is not None
    assert not {copy.arg for copy in report.copies} & {"ckv_cache", "kpe_cache"}
    first = np.minimum(LENGTHS, PAGE)  # the first block of each sequence, and the others
    rest = lz.mla_decode(*given, np.roll(TABLES, -1, 1), LENGTHS - first, scale=scale)
    merged = lz.merge_attention(*lz.mla_decode(*given, TABLES, first, scale=scale), *rest)
    for out, _ in (found, merged):
        made = np.einsum("bhc,hvc->bhv", np.asarray(out, np.float64), up_v)
        assert reference.error(made, np.array(wanted)) <= (1e-5 if dtype == "float32" else 5e-3)
    with pytest.raises(lz.InvalidArgument, match=r"mla_decode: seq_lens\[1\] is 41; allowed: 0 to 40"):
        lz.mla_decode(*given, TABLES, np.array([1, 41, 2], np.int32), scale=scale)


def test_merged_parts_are_the_whole_on_every_backend() -> None:
    """Split keys, in either layout; a part that sees nothing of a row changes nothing."""
    for layout, axis in (("BHSD", 2), ("BSHD", 1)):
        shape = {"BHSD": (2, 3, 7, 16), "BSHD": (2, 7, 3, 16)}[layout]
        q, k, v = (numbers(n, *shape) for n in range(3))
        mask = np.random.default_rng(4).random((2, 1, 7, 7)) < 0.5
        mask[0, :, 2, :4] = mask[1, :, 5] = False
        parts = []
        for keys in (slice(0, 4), slice(4, 5), slice(5, 7)):
            some = (slice(None),) * axis + (keys,)
            parts += lz.attention_forward(q, k[some], v[some], mask[..., keys], layout=layout)
        wanted = lz.attention_forward(q, k, v, mask, layout=layout)
        for backend in ("torch", "mlx", *(["onnxruntime"] if layout == "BHSD" else [])):  # which takes dense rows alone
            found = lz.merge_attention(*parts, layout=layout, backend=backend)
            for one, expected in zip(found, wanted, strict=True):
                assert one.shape == expected.shape
                assert reference.error(np.asarray(one, np.float64), np.asarray(expected, np.float64)) <= 1e-5


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_scales_of_each_token_and_head_are_kept_beside_the_numbers(kv_layout: str) -> None:
    """They are taken from the data and stored in caches of their own, by the same slots; so a step of decoding reads
    what an exact one would, within a step of the scale."""
    lead = (BLOCKS, PAGE, KV_HEADS) if kv_layout == "NHD" else (BLOCKS, KV_HEADS, PAGE)
    caches = [lz.empty((*lead, DIM), np.int8) for _ in "kv"]
    scales = [lz.empty((*lead, 1)) for _ in "kv"]
    count = int(LENGTHS.sum())
    rows = [numbers(n, count, KV_HEADS, DIM) * np.exp(numbers(n + 2, count, KV_HEADS, 1)) for n in (1, 2)]
    places = slots(np.zeros(3, int), LENGTHS)
    made = [lz.dynamic_quantize(one) for one in rows]
    for index, held in enumerate((caches, scales)):
        lz.append_kv(*(one[index] for one in made), *held, places, kv_layout=kv_layout)
    raw, of_each = (lz.gather_kv(*held, places, kv_layout=kv_layout) for held in (caches, scales))
    read = [lz.dequantize(*both) for both in zip(raw, of_each, strict=True)]
    for one, row, (_, scale, _) in zip(read, rows, made, strict=True):
        assert (np.abs(np.asarray(one) - row) <= 0.501 * np.asarray(scale)).all()
    q, starts = numbers(7, 3, HEADS, DIM), ends(LENGTHS)
    out, _ = lz.attention_varlen_forward(q, *read, ends(np.ones(3, int)), starts)
    plain, _ = lz.attention_varlen_forward(q, *rows, ends(np.ones(3, int)), starts)
    assert np.abs(np.asarray(out) - np.asarray(plain)).max() <= 0.1


def test_a_quantized_cache_gives_back_what_quantize_made_of_its_tokens() -> None:
    """Scales of each head; a block is copied before one of two sequences that share it writes to it."""
    caches = [lz.empty((BLOCKS, PAGE, KV_HEADS, DIM), np.int8) for _ in "kv"]
    rows, scales = [numbers(n, 12, KV_HEADS, DIM) for n in (1, 2)], np.array([[[0.03], [0.01]]], np.float32)
    stored = [lz.quantize(one, scales, dtype="int8") for one in rows]
    places = np.arange(PAGE, PAGE + 12)
    lz.append_kv(*stored, *caches, places)
    lz.copy_kv_blocks(*caches, np.array([1, -1], np.int32), np.array([5, 0], np.int32))
    lz.append_kv(*(one[:1] for one in stored), *caches, np.array([2 * PAGE - 1]))
    found = lz.gather_kv(*caches, np.where(places < 2 * PAGE, places + 4 * PAGE, places))
    for raw, one, row in zip(found, stored, rows, strict=True):
        assert np.array_equal(raw, one)
        back = lz.dequantize(raw, scales)
        exact = reference.dequantize(reference.quantize(row, scales, dtype="int8"), scales, dtype="float32")
        assert reference.error(np.asarray(back, np.float64), exact) <= 1e-6


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_cache_with_scales_gives_what_dequantize_and_attention_give(kv_layout: str) -> None:
    """Stored as quantize makes it, whatever backend stores it; read by each of them, with its options."""
    lead = (BLOCKS, PAGE, KV_HEADS) if kv_layout == "NHD" else (BLOCKS, KV_HEADS, PAGE)
    caches = [lz.empty((*lead, DIM), np.int8) for _ in "kv"]
    scales = np.array([0.03, 0.01], np.float32), np.array(0.02, np.float32)
    count, total = int(LENGTHS.sum()), int(LENGTHS.sum()) - 1
    rows = [numbers(n, count, KV_HEADS, DIM) * 3 for n in (1, 2)]
    rows[1][0, 0, :3] = np.inf, -np.inf, 1e9
    places, starts = slots(np.zeros(3, int), LENGTHS), ends(LENGTHS)
    for part, backend in ((slice(0, total), "torch"), (slice(total, count), "mlx")):
        lz.append_kv(*(one[part] for one in rows), *caches, places[part], *scales, kv_layout=kv_layout, backend=backend)
    held = lz.gather_kv(*caches, places, kv_layout=kv_layout)
    exact = []
    for raw, row, step in zip(held, rows, (scales[0].reshape(1, 2, 1), scales[1].reshape(1, 1, 1)), strict=True):
        stored = np.asarray(raw).astype(np.float32)
        assert np.array_equal(stored, reference.quantize(row, step, dtype="int8").astype(np.float32))
        exact.append(stored * step)
    q, options = numbers(7, 3, HEADS, DIM), {"window_size": (9, -1), "softcap": 5.0}
    wanted = lz.attention_varlen_forward(
        q, *exact, ends(np.ones(3, int)), starts, causal_alignment="bottom_right", is_causal=True, **options
    )
    turned = [np.asarray(one).astype(np.float32) for one in caches]
    turned = [one if kv_layout == "NHD" else one.swapaxes(1, 2) for one in turned]
    plain = reference.paged_attention(q, *turned, TABLES, LENGTHS, scales[0], scales[1].reshape(1), scale=0.25)
    for backend in ("torch", "mlx"):
        place: dict[str, Any] = {"kv_layout": kv_layout, "backend": backend}
        read = lz.gather_kv(*caches, places, *scales, **place)
        for one, expected in zip(read, exact, strict=True):
            assert np.array_equal(one, expected)
        given = q, *caches, TABLES, LENGTHS
        found = lz.paged_attention_forward(*given, k_scale=scales[0], v_scale=scales[1], **options, **place)
        decoded = lz.paged_attention(*given, *scales, scale=0.25, **place)
        for one, expected in ((found[0], wanted[0]), (found[1], wanted[1]), (decoded, plain)):
            assert reference.error(np.asarray(one, np.float64), np.asarray(expected, np.float64)) <= 1e-5
