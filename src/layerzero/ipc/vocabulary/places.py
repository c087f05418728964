"""Index tensors that nobody has data for: values that lead nowhere outside of the other tensors."""

from __future__ import annotations

from collections.abc import Mapping

from layerzero.ipc.vocabulary.tensors import TensorSpec


def places(name: str, specs: Mapping[str, TensorSpec | None]) -> tuple[int, int] | None:
    """The first and the last of the evenly spaced values of the index tensor `name`; None where random ones will do."""
    tokens, cache, tables = specs.get(f"{name[-1]}"), specs.get("k_cache"), specs.get("block_tables")
    cache = cache or specs.get("ckv_cache")
    if name in ("sources", "targets") and cache is not None and cache.ndim:  # the second half gets the first one's
        half = cache.shape[0] // 2
        return (0, max(half - 1, 0)) if name == "sources" else (half, max(cache.shape[0] - 1, 0))
    if name == "slots" and cache is not None and cache.ndim > 1:
        return 0, max(cache.shape[0] * cache.shape[1] - 1, 0)
    if name.startswith("cu_seqlens_") and tokens is not None and tokens.ndim:
        return 0, tokens.shape[0]
    rows, weights = specs.get("input") or specs.get("x"), specs.get("down")
    if name == "offsets" and rows is not None and rows.ndim:
        return rows.shape[0] // max(_rows_of(specs, name), 1), rows.shape[0]
    if name == "order":
        return 0, max(_rows_of(specs, name) - 1, 0)
    if name == "ids":
        return 0, max(weights.shape[0] - 1, 0) if weights is not None and weights.ndim else 0
    if name == "target" and rows is not None and rows.ndim:
        return 0, max(rows.shape[min(rows.ndim - 1, 1)] - 1, 0)
    if name == "parents":
        return -1, -1
    data = specs.get({"token_ids": "logits", "draft_ids": "target_probs"}.get(name, ""))
    if data is not None and data.ndim:
        return 0, max(data.shape[-1] - 1, 0)
    if cache is None or tables is None or min(cache.ndim, tables.ndim) < 2:
        return None
    if name == "block_tables":
        return 0, max(cache.shape[0] - 1, 0)
    length = cache.shape[1] * tables.shape[1]
    return length, length


def _rows_of(specs: Mapping[str, TensorSpec | None], name: str) -> int:
    spec = specs.get(name)
    return spec.shape[0] if spec is not None and spec.ndim else 0
