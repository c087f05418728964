"""layerzero.engines.vllm: the wrappers of vLLM's attention backends on CPU tensors, against float64, and the plugin."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.serving_engines import signatures
from tests.serving_engines import vllm_stand_in as vllm
from torch import Tensor

import layerzero as lz
from layerzero.engines import flashinfer, guard
from layerzero.engines import vllm as ours
from layerzero.torch import running

RECORDED = signatures.recorded("vllm")["signatures"]
HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 16, 4


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    vllm.put_in()
    vllm.called.clear()
    ours.clear()
    yield
    attention()._guard.cache_clear()


def attention() -> Any:
    return importlib.import_module("layerzero.engines.vllm.attention")


def backend(name: str) -> Any:
    """As vLLM resolves the path of a backend."""
    module, _, cls = ours.BACKENDS[name].rpartition(".")
    return getattr(importlib.import_module(module), cls)


def batch(
    lengths: tuple[int, ...],
    queries: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    name: str = "LAYERZERO",
    **said: Any,
) -> dict[str, Any]:
    """Arguments of forward: sequences of `lengths`, the last `queries` tokens of which are asked; the output has two
    rows more, which pad it."""
    random = torch.Generator().manual_seed(1)
    tokens, width = sum(queries), max(1, math.ceil(max(lengths) / PAGE))
    blocks = torch.randperm(len(lengths) * width + 2, generator=random)[: len(lengths) * width]
    cls = vllm.FlashAttentionMetadata if name == "LAYERZERO" else vllm.TritonAttentionMetadata
    meta = cls(
        num_actual_tokens=tokens,
        max_query_len=max(queries),
        query_start_loc=torch.tensor([0, *queries]).cumsum(0).int(),
        max_seq_len=max(lengths) + 1,  # an upper bound
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.cat((blocks.view(-1, width), torch.zeros(len(lengths), 3).long()), 1).int(),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        **said,
    )
    shape = (len(lengths) * width + 2, KV_HEADS, PAGE, 2 * SIZE)
    cache = torch.randn(shape, generator=random).to(dtype)
    query = torch.randn((tokens + 2, HEADS, SIZE), generator=random).to(dtype)
    key = torch.zeros(tokens + 2, KV_HEADS, SIZE, dtype=dtype)
    layer, output = torch.nn.Module(), torch.full((tokens + 2, HEADS, SIZE), -7.0, dtype=dtype)
    given = {"layer": layer, "query": query, "key": key, "value": key, "kv_cache": cache}
    return given | {"attn_metadata": meta, "output": output}


def impl(cls: Any, **options: Any) -> Any:
    usual = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    return cls(num_heads=HEADS, head_size=SIZE, scale=0.3, num_kv_heads=KV_HEADS, **(usual | options))


def expected(name: str, call: dict[str, Any], **options: Any) -> Tensor:
    """The wrapped backend's."""
    wrapped = vllm.FlashAttentionImpl if name == "LAYERZERO" else vllm.TritonAttentionImpl
    output: Tensor = impl(wrapped, **options).forward(**call | {"output": call["output"].clone()})
    vllm.called.clear()
    return output


def outcomes() -> dict[str, int]:
    return {row.outcome: row.calls for row in ours.report().rows}


BATCHES = {
    "decoding": ((9, 1, 4), (1, 1, 1)),
    "prompts": ((9, 1, 4), (9, 1, 4)),
    "chunks after a prefix, and decoding": ((9, 5, 12), (3, 1, 12)),
    "a request without tokens": ((9, 5), (1, 0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ours.BACKENDS)
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_is_served(kind: str, name: str, dtype: torch.dtype) -> None:
    """Into vLLM's own output, whose padding stays as it is."""
    call = batch(*BATCHES[kind], dtype, name)
    wanted = expected(name, call)
    found = impl(backend(name).get_impl_cls()).forward(**call)
    assert found is call["output"]
    assert guard.difference([found], [wanted]) is None
    assert (found[-2:] == -7).all()
    assert vllm.called == []
    assert outcomes() == {"served": 1}


def test_a_batch_that_is_not_causal_is_served() -> None:
    """causal=False is one of vLLM's own."""
    call = batch((9, 4), (3, 4), causal=False)
    wanted = expected("LAYERZERO", call)
    found = impl(backend("LAYERZERO").get_impl_cls()).forward(**call)
    assert guard.difference([found], [wanted]) is None
    assert outcomes() == {"served": 1}


LAYERS: dict[str, dict[str, Any]] = {
    "logits_soft_cap": {"logits_soft_cap": 2.0},
    "sliding_window": {"sliding_window": 4},
    "alibi_slopes": {"alibi_slopes": torch.ones(HEADS)},
    "sinks": {"sinks": torch.ones(HEADS)},
    "attn_type": {"attn_type": "encoder"},
}


@pytest.mark.parametrize("reason", LAYERS)
def test_what_a_layer_has_besides_is_vllms(reason: str) -> None:
    """Never ignored."""
    call = batch((9, 4), (1, 1))
    wanted = expected("LAYERZERO", call, **LAYERS[reason])
    found = impl(backend("LAYERZERO").get_impl_cls(), **LAYERS[reason]).forward(**call)
    assert torch.equal(found, wanted)
    assert vllm.called == ["FlashAttentionImpl"]
    assert outcomes() == {f"handed to vLLM: {reason}": 1}


BESIDES: dict[str, dict[str, Any]] = {
    "metadata rswa_prefix_lens": {"rswa_prefix_lens": torch.ones(2)},
    "metadata mm_prefix_query_range_tensor": {"mm_prefix_query_range_tensor": torch.ones(2)},
    "metadata dcp_context_kv_lens": {"dcp_context_kv_lens": torch.ones(2)},
    "causal for each sequence": {"causal": torch.ones(2, dtype=torch.bool)},
}


@pytest.mark.parametrize("reason", BESIDES)
def test_what_a_batch_has_besides_is_vllms(reason: str) -> None:
    """So is each field that a later release may add, where it is set."""
    call = batch((9, 4), (1, 1), **BESIDES[reason])
    impl(backend("LAYERZERO").get_impl_cls()).forward(**call)
    assert vllm.called == ["FlashAttentionImpl"]
    assert outcomes() == {f"handed to vLLM: {reason}": 1}


def test_triton_looks_back_in_chunks_by_itself() -> None:
    """An argument that only that backend has."""
    call = batch((9, 4), (1, 1), name="TRITON_LAYERZERO")
    impl(backend("TRITON_LAYERZERO").get_impl_cls(), chunk_lookback=1).forward(**call)
    assert outcomes() == {"handed to vLLM: chunk_lookback": 1}


def test_caches_of_other_dtypes_and_layouts_are_vllms() -> None:
    """8-bit caches, and those of a release with another layout."""
    made = impl(backend("LAYERZERO").get_impl_cls())
    call = batch((9, 4), (1, 1))
    made.forward(**call | {"kv_cache": call["kv_cache"].half()})
    assert outcomes() == {"handed to vLLM: dtypes": 1}
    ours.clear()
    with pytest.raises(RuntimeError):  # of the stand-in, which cannot either
        made.forward(**call | {"kv_cache": call["kv_cache"][..., :-1]})
    assert outcomes() == {"handed to vLLM: layout of the cache": 1}


def test_the_run_that_measures_memory_is_vllms() -> None:
    """It has no batch, and no cache either."""
    call = batch((9, 4), (1, 1)) | {"attn_metadata": None, "kv_cache": torch.empty(0)}
    assert (impl(backend("LAYERZERO").get_impl_cls()).forward(**call) == 0).all()
    assert outcomes() == {}


def test_errors_do_not_reach_vllm() -> None:
    """A call that no kernel takes has its result."""
    call = batch((9, 4), (3, 4))
    wanted = expected("LAYERZERO", call)
    with lz.avoid("*"):
        found = impl(backend("LAYERZERO").get_impl_cls()).forward(**call)
    assert torch.equal(found, wanted)
    assert outcomes() == {"handed to vLLM: error NO_BACKEND": 1}


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAYERZERO_DISABLE=1."""
    monkeypatch.setattr(running, "IS_DISABLED", True)
    impl(backend("LAYERZERO").get_impl_cls()).forward(**batch((9, 4), (1, 1)))
    assert outcomes() == {"handed to vLLM: LAYERZERO_DISABLE": 1}


def test_shadow_and_share_are_told_by_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's processes inherit nothing else."""
    monkeypatch.setenv("LAYERZERO_ENGINE_SHADOW", "1")
    monkeypatch.setenv("LAYERZERO_ENGINE_SHARE", "0.5")
    made = impl(backend("LAYERZERO").get_impl_cls())
    for _ in range(4):
        made.forward(**batch((9, 4), (1, 1)))
    assert outcomes() == {"shadow: the same": 2, "left to vLLM: share": 2}
    assert vllm.called == ["FlashAttentionImpl"] * 4


def test_plugin_registers_names_and_may_be_called_again() -> None:
    """Each process of vLLM loads it, and some more than once."""
    ours.register()
    ours.register()
    for name, path in ours.BACKENDS.items():
        assert vllm.AttentionBackendEnum[name].value == path
        assert backend(name).get_name() == name
        assert issubclass(backend(name).get_impl_cls(), (vllm.FlashAttentionImpl, vllm.TritonAttentionImpl))


def test_plugin_enables_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, where the variable says so."""
    monkeypatch.setenv("LAYERZERO_ENGINE_FLASHINFER", "1")
    ours.register()
    ours.register()
    assert flashinfer.is_enabled()
    flashinfer.disable()
    assert not flashinfer.is_enabled()


def test_a_share_that_is_none_stops_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its start, by the name of the variable."""
    monkeypatch.setenv("LAYERZERO_ENGINE_SHARE", "many")
    with pytest.raises(lz.InvalidArgument, match="LAYERZERO_ENGINE_SHARE"):
        ours.register()


def test_wrappers_take_what_vllm_gives() -> None:
    """The same arguments in the same order; so do the stand-ins of these tests."""
    for name, module in (
        ("LAYERZERO", "flash_attn.FlashAttention"),
        ("TRITON_LAYERZERO", "triton_attn.TritonAttention"),
    ):
        wrapped = f"vllm.v1.attention.backends.{module}"
        cls = backend(name).get_impl_cls()
        for function in (cls.forward, cls.__bases__[-1].forward):
            assert list(inspect.signature(function).parameters) == RECORDED[f"{wrapped}Impl.forward"]
        assert list(inspect.signature(cls.__init__).parameters) == RECORDED[f"{wrapped}Impl.__init__"]
        assert list(inspect.signature(backend(name).get_name).parameters) == RECORDED[f"{wrapped}Backend.get_name"]
    path = "vllm.v1.attention.backends"
    assert list(vllm.FlashAttentionMetadata.__annotations__) == RECORDED[f"{path}.flash_attn.FlashAttentionMetadata"]
    assert list(vllm.TritonAttentionMetadata.__annotations__) == RECORDED[f"{path}.triton_attn.TritonAttentionMetadata"]
    assert list(inspect.signature(vllm.register_backend).parameters) == RECORDED[f"{path}.registry.register_backend"]


def test_fields_are_those_of_vllm() -> None:
    """What is read of a batch exists in all releases that were recorded."""
    fields = {name: set(found) for name, found in RECORDED.items() if name.endswith("Metadata")}
    assert all(found >= attention()._USED for found in fields.values())
    assert set().union(*fields.values()) >= attention()._INERT
