"""Transformers' attention function: a layer's call as one of lz.attention where that has all that is asked for; else
the model's own formula, or Transformers' SDPA, computes it. Nothing that is asked for is ignored."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import create_position_bias_mask, sdpa_attention_forward

from layerzero.torch.evidence import SLOWER, TRYING, Turn
from layerzero.transformers import masks, running
from layerzero.transformers.modeling import ModelingFile, file_of
from layerzero.transformers.running import HandedOver

# What layers say besides. Of what is left over, each is handed to the model's own formula where only that names it.
# A mask says the same of a sliding window, as it does for SDPA and for the formula.
_SAID_BY_MASKS = frozenset({"sliding_window"})
_CAP, _SINKS = "softcap", ("s_aux", "sinks")  # which SDPA of Transformers refuses, and ignores


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    if_faster: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A layer's attention: query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv) -> (B, Sq, Hq, Dv), and the
    weights where output_attentions asks for them. `attention_mask` is bool (True: attend), or added; None: all, or up
    to itself with is_causal. `cache`: continuous batching's, which has the keys. `if_faster`: kinds of calls
    that were timed to be slower so than by SDPA are SDPA's."""
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    file = file_of(module)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    # Without a mask SDPA's layers see up to themselves. Those of models that do not know SDPA always get a mask that
    # says so; without one they see all.
    causal = query.shape[2] > 1 and attention_mask is None and file.takes_sdpa and causal
    if (sparse := kwargs.pop("indices", None)) is not None:
        attention_mask = _both(attention_mask, causal, query, key, masks.selected(sparse, key.shape[2]))
        causal = False
    if (blocks := kwargs.pop("block_indices", None)) is not None:
        attention_mask = _of_blocks(module, blocks, attention_mask, query, key, kwargs.get("position_ids"))
        causal = False
    given = (query, key, value, attention_mask, dropout, scaling, causal, position_bias)
    cap, sinks = kwargs.get(_CAP), next((found for name in _SINKS if (found := kwargs.get(name)) is not None), None)
    reason = _eager_reason(file, kwargs, query, cap, sinks)
    if reason is not None:
        return _by_eager(reason, module, given, kwargs)
    is_beyond_sdpa = bool(cap) or sinks is not None
    try:
        if running.IS_DISABLED:
            raise HandedOver("LAYERZERO_DISABLE")
        if if_faster and not is_beyond_sdpa:
            return _by_the_faster(module, given, kwargs)
        return _by_ours(module, given, float(cap or 0.0), sinks)
    except HandedOver as why:
        return (_by_eager if is_beyond_sdpa else _by_sdpa)(str(why), module, given, kwargs)


def attention_if_faster(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """As `attention`, but for kinds of calls that were timed to be slower so than by SDPA."""
    return attention(*args, **{**kwargs, "if_faster": True})


def _by_the_faster(module: nn.Module, given: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, None]:
    """By what was faster for calls of this kind; while that is not known, by each in turns. Raises HandedOver."""
    if torch.compiler.is_compiling():
        raise HandedOver("compiled, where nobody can time it")
    trial = running.evidence.trial("attention", given)
    turn = Turn.OURS if trial is None else trial.turn()
    if turn is Turn.NATIVE:
        return _by_sdpa(SLOWER, module, given, kwargs)
    start_ns = time.perf_counter_ns()
    is_native = turn is Turn.TRY_NATIVE
    result = _by_sdpa(TRYING, module, given, kwargs) if is_native else _by_ours(module, given)
    if trial is not None and turn is not Turn.OURS:
        trial.add(turn, time.perf_counter_ns() - start_ns)
    return result


def _by_ours(
    module: nn.Module, given: tuple[Any, ...], cap: float = 0.0, sinks: Tensor | None = None
) -> tuple[Tensor, None]:
    """Raises HandedOver."""
    out = _serve(*[*given, cap, sinks])
    running.count(module, "attention")
    return out, None


def _by_sdpa(why: str, module: nn.Module, given: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, None]:
    running.count(module, "attention", f"handed to SDPA: {why}")
    found: tuple[Tensor, None] = sdpa_attention_forward(module, *given, **kwargs)
    return found


def _by_eager(
    why: str, module: nn.Module, given: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    running.count(module, "attention", f"handed to the model's own formula: {why}")
    return _eager(module, *[*given, kwargs])


def _serve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    position_bias: Tensor | None,
    cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """By lz.attention. Raises HandedOver."""
    if dropout:
        raise HandedOver("dropout")
    running.check_attention(query, key, value, mask)
    if causal and key.shape[2] > query.shape[2]:  # a prefill on a static cache, of which the rest is empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., : query.shape[2]]
    if position_bias is not None:
        mask, causal = create_position_bias_mask(position_bias, mask, causal, query, key), False
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        mask = mask.to(query.dtype)
    batch = max(query.shape[0], key.shape[0])  # queries that are learned have a batch of one
    if query.shape[0] != batch:
        query = query.expand(batch, -1, -1, -1)
    rule: tuple[Any, ...] = (mask, 0.0, bool(causal), scaling, query.shape[1] != key.shape[1])
    if sinks is not None:
        rule = (*rule, sinks.to(query.dtype))
    options: dict[str, Any] = {"softcap": cap} if cap else {}
    if _is_dense(query, key, value):
        out = running.call("attention", query, key, value, *rule, **options)
        return out.transpose(1, 2).contiguous()
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return running.call("attention", q, k, v, *rule, **options, layout="BSHD")


def _is_dense(*tensors: Tensor) -> bool:
    """Whether all lie so as they are given, as a cache's keys do: a CPU would copy their transposes by elements."""
    if torch.compiler.is_compiling() or tensors[0].device.type != "cpu":
        return False
    return all(tensor.is_contiguous() for tensor in tensors)


def _eager_reason(file: ModelingFile, kwargs: dict[str, Any], query: Tensor, cap: Any, sinks: Any) -> str | None:
    """Why only the model's own formula has what is asked for, or None."""
    if cap is not None and not isinstance(cap, (int, float)):
        return "soft cap"
    is_odd = sinks is not None and not (isinstance(sinks, Tensor) and sinks.shape == query.shape[1:2])
    if is_odd or (file.has_sinks and sinks is None):
        return "sinks"
    for name, value in kwargs.items():
        if value is None or value is False or name in _SAID_BY_MASKS or name == _CAP or name in _SINKS:
            continue
        if name == "output_attentions" or name in file.arguments:
            return name
    return None if file.is_ordinary else "a formula of its own"


def _eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    position_bias: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """By the formula in the model's own file, which adds masks to scores."""
    formula = file_of(module).eager
    if formula is None:
        raise NotImplementedError(
            f"Load this model with attn_implementation='eager': {type(module).__name__} asks for what no kernel of "
            "LayerZero and not SDPA has, and its file has no formula of its own."
        )
    if causal:
        mask = masks.causal(query, key)
    if mask is not None:
        mask = masks.as_float(mask, query.dtype)
    if position_bias is not None:
        kwargs = {**kwargs, "position_bias": position_bias}
    out: tuple[Tensor, Tensor | None] = formula(
        module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
    )
    return out


def _both(mask: Tensor | None, causal: bool, query: Tensor, key: Tensor, other: Tensor) -> Tensor:
    return masks.both(masks.causal(query, key) if causal else mask, other)


def _of_blocks(
    module: Any, blocks: Tensor, mask: Tensor | None, query: Tensor, key: Tensor, position_ids: Tensor | None
) -> Tensor:
    """The mask of blocks of keys that MiniMax M3's indexer has selected, as the layer makes it for SDPA."""
    seq_q, seq_k = query.shape[2], key.shape[2]
    if position_ids is None:
        position_ids = torch.arange(seq_k - seq_q, seq_k, device=query.device)
    if position_ids.ndim == 1:
        position_ids = position_ids.unsqueeze(0)
    position_ids = position_ids.expand(query.shape[0], -1)
    made: Tensor = module.indexer.build_block_mask(blocks, mask, seq_k, query.dtype, query.device, position_ids)
    return made
