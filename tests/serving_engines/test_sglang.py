"""layerzero.engines.sglang: the wrappers of SGLang's attention backends on CPU tensors, against float64, and the
plugin."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.serving_engines import sglang_stand_in as sglang
from tests.serving_engines import signatures
from torch import Tensor

import layerzero as lz
from layerzero.engines import guard
from layerzero.engines import sglang as ours
from layerzero.torch import running

RECORDED = signatures.recorded("sglang")["signatures"]
HEADS, KV_HEADS, SIZE = 4, 2, 16
SLOTS = 40


@pytest.fixture(autouse=True)
def _sglang() -> Iterator[None]:
    sglang.put_in()
    ours.register()
    sglang.called.clear()
    ours.clear()
    yield
    importlib.import_module("layerzero.engines.sglang.attention")._guard.cache_clear()


class Program:
    """A model runner, a layer and a batch, of sequences of `lengths`, the last `queries` tokens of which are new: their
    keys are not in the pool yet."""

    def __init__(self, lengths: tuple[int, ...], queries: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        random = torch.Generator().manual_seed(1)
        self.keys, self.values = (torch.randn((SLOTS, KV_HEADS, SIZE), generator=random).to(dtype) for _ in range(2))
        requests, longest = len(lengths), max(lengths)
        table = torch.zeros(requests + 1, longest + 2, dtype=torch.int32)
        table[1:, :longest] = torch.randperm(SLOTS, generator=random)[: requests * longest].view(requests, longest)
        rows = torch.arange(requests, 0, -1)
        news = [table[row, n - new : n] for row, n, new in zip(rows, lengths, queries, strict=True)]
        tokens = sum(queries)
        is_decoding = set(queries) == {1}
        self.batch = types.SimpleNamespace(
            forward_mode=sglang.ForwardMode.DECODE if is_decoding else sglang.ForwardMode.EXTEND,
            req_pool_indices=rows,
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            out_cache_loc=torch.cat(news).long(),
            out_cache_loc_is_physical=False,
            extend_seq_lens=None if is_decoding else torch.tensor(queries),
            extend_seq_lens_cpu=None if is_decoding else list(queries),
            encoder_lens=None,
            spec_info=None,
            multi_item_delimiter_indices=None,
        )
        self.q = torch.randn((tokens, HEADS * SIZE), generator=random).to(dtype)
        self.k, self.v = (torch.randn((tokens, KV_HEADS, SIZE), generator=random).to(dtype) for _ in range(2))
        self.table = table
        self.pool: Any = sglang.MHATokenToKVPool

    def run(self, name: str, layer: dict[str, Any] | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """What a backend of this name returns, and the keys that the pool has then."""
        pool = self.pool(self.keys.clone(), self.values.clone())
        requests = types.SimpleNamespace(req_to_token=self.table)
        runner = types.SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=requests, use_mla_backend=False)
        backend = sglang.ATTENTION_BACKENDS[name](runner)
        made = sglang.RadixAttention(HEADS, SIZE, 0.3, KV_HEADS, 0, **(layer or {}))
        is_decoding = self.batch.forward_mode.is_decode()
        forward = backend.forward_decode if is_decoding else backend.forward_extend
        return forward(self.q, self.k, self.v, made, self.batch, **options), pool.buffers[0]

    def theirs(self, name: str, **options: Any) -> tuple[Tensor, Tensor]:
        """The wrapped backend's."""
        found = self.run(ours.BACKENDS[name], **options)
        sglang.called.clear()
        return found


def outcomes() -> dict[str, int]:
    return {row.outcome: row.calls for row in ours.report().rows}


BATCHES = {
    "decoding": ((9, 1, 4), (1, 1, 1)),
    "prompts": ((9, 1, 4), (9, 1, 4)),
    "after a prefix": ((9, 5, 11), (3, 1, 11)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ours.BACKENDS)
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_is_served(kind: str, name: str, dtype: torch.dtype) -> None:
    """New keys and values are in the pool afterwards, as SGLang's next step wants them."""
    program = Program(*BATCHES[kind], dtype)
    wanted, keys = program.theirs(name)
    found, ours_keys = program.run(name)
    assert guard.difference([found], [wanted]) is None
    assert torch.equal(ours_keys, keys)
    assert sglang.called == []
    assert outcomes() == {"served": 1}


def test_keys_that_are_not_to_be_saved_stay_out() -> None:
    """save_kv_cache=False: somebody has put them there."""
    program = Program((9, 4), (1, 1))
    wanted, keys = program.theirs("layerzero_triton", save_kv_cache=False)
    found, ours_keys = program.run("layerzero_triton", save_kv_cache=False)
    assert guard.difference([found], [wanted]) is None
    assert torch.equal(ours_keys, keys)
    assert torch.equal(ours_keys, program.keys)


LAYERS: dict[str, dict[str, Any]] = {
    "logit_cap": {"logit_cap": 2.0},
    "sliding_window_size": {"sliding_window_size": 4},
    "is_cross_attention": {"is_cross_attention": True},
    "attn_type": {"attn_type": sglang.AttentionType.ENCODER_ONLY},
    "use_irope": {"use_irope": True},
}


@pytest.mark.parametrize("reason", LAYERS)
def test_what_a_layer_has_besides_is_sglangs(reason: str) -> None:
    """Never ignored."""
    program = Program((9, 4), (1, 1))
    wanted, _ = program.theirs("layerzero_triton", layer=LAYERS[reason])
    found, _ = program.run("layerzero_triton", layer=LAYERS[reason])
    assert torch.equal(found, wanted)
    assert sglang.called == ["TorchNativeAttnBackend"]
    assert outcomes() == {f"handed to SGLang: {reason}": 1}


BESIDES: dict[str, dict[str, Any]] = {
    "spec_info": {"spec_info": object()},
    "encoder_lens": {"encoder_lens": torch.ones(2)},
    "mha_return_lse": {"mha_return_lse": True},
    "attn_output": {"_attn_output": torch.ones(2)},
    "several queries for each sequence": {"forward_mode": sglang.ForwardMode.DECODE},
    "mode TARGET_VERIFY": {"forward_mode": sglang.ForwardMode.TARGET_VERIFY},
    "padded queries": {"extend_seq_lens_cpu": [3, 2]},
}


@pytest.mark.parametrize("reason", BESIDES)
def test_what_a_batch_has_besides_is_sglangs(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation, encoders, log-sum-exp, graphs, padding."""
    program = Program((9, 4), (3, 1))
    vars(program.batch).update(BESIDES[reason])
    monkeypatch.setattr(sglang.TorchNativeAttnBackend, "_attend", lambda self, *args: "theirs")
    assert program.run("layerzero_triton")[0] == "theirs"
    assert outcomes() == {f"handed to SGLang: {reason}": 1}


def test_arguments_that_only_one_backend_has_are_its_own() -> None:
    """Sinks, score_mod."""
    program = Program((9, 4), (1, 1))
    program.run("layerzero_triton", sinks=torch.ones(HEADS))
    assert outcomes() == {"handed to SGLang: argument sinks": 1}


def test_other_pools_are_sglangs() -> None:
    """Their slots may be others for some layers, or their numbers scaled."""
    program = Program((9, 4), (1, 1))
    program.pool = type("SWAKVPool", (sglang.MHATokenToKVPool,), {})
    program.run("layerzero_triton")
    assert outcomes() == {"handed to SGLang: pool SWAKVPool": 1}


def test_pools_of_another_layout_are_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of heads first (SGLANG_USE_HND_KVCACHE), and others."""
    program = Program((9, 4), (1, 1))
    program.keys, program.values = (
        one.view(10, 4, KV_HEADS, SIZE).transpose(1, 2) for one in (program.keys, program.values)
    )
    monkeypatch.setattr(sglang.TorchNativeAttnBackend, "_attend", lambda self, *args: "theirs")
    assert program.run("layerzero_triton")[0] == "theirs"
    assert outcomes() == {"handed to SGLang: layout of the pool": 1}


@pytest.mark.parametrize("queries", [(1, 1), (3, 4)])
def test_errors_do_not_reach_sglang(queries: tuple[int, int]) -> None:
    """By then the new keys are in the pool; the wrapped backend puts the same there."""
    program = Program((9, 4), queries)
    wanted, keys = program.theirs("layerzero_triton")
    with lz.avoid("*"):
        found, ours_keys = program.run("layerzero_triton")
    assert torch.equal(found, wanted)
    assert torch.equal(ours_keys, keys)
    assert outcomes() == {"handed to SGLang: error NO_BACKEND": 1}


def test_shadow_and_share_are_told_by_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's processes inherit nothing else."""
    monkeypatch.setenv("LAYERZERO_ENGINE_SHADOW", "1")
    monkeypatch.setenv("LAYERZERO_ENGINE_SHARE", "0.5")
    program = Program((9, 4), (1, 1))
    for _ in range(4):
        program.run("layerzero_triton")
    assert outcomes() == {"shadow: the same": 2, "left to SGLang: share": 2}


def test_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAYERZERO_DISABLE=1."""
    monkeypatch.setattr(running, "IS_DISABLED", True)
    Program((9, 4), (1, 1)).run("layerzero_triton")
    assert outcomes() == {"handed to SGLang: LAYERZERO_DISABLE": 1}


def test_models_with_latent_attention_keep_sglangs_backend() -> None:
    """Their pools hold no keys."""
    runner = types.SimpleNamespace(
        token_to_kv_pool=None, req_to_token_pool=types.SimpleNamespace(req_to_token=None), use_mla_backend=True
    )
    assert type(sglang.ATTENTION_BACKENDS["layerzero_triton"](runner)) is sglang.TritonAttnBackend


def test_plugin_registers_names_and_may_be_called_again() -> None:
    """The command line takes a name once."""
    ours.register()
    for name, wrapped in ours.BACKENDS.items():
        assert sglang.ATTENTION_BACKEND_CHOICES.count(name) == 1
        runner = types.SimpleNamespace(
            token_to_kv_pool=None, req_to_token_pool=types.SimpleNamespace(req_to_token=None), use_mla_backend=False
        )
        assert isinstance(sglang.ATTENTION_BACKENDS[name](runner), sglang.WRAPPED[wrapped])


def test_wrappers_take_what_sglang_gives() -> None:
    """The same arguments in the same order, and by name what a backend has besides; so do the stand-ins of these
    tests."""
    wrapper = importlib.import_module("layerzero.engines.sglang.attention")._wrapper
    places = {
        "triton": "triton_backend.TritonAttnBackend",
        "flashinfer": "flashinfer_backend.FlashInferAttnBackend",
        "torch_native": "torch_native_backend.TorchNativeAttnBackend",
    }
    for name, cls in sglang.WRAPPED.items():
        for function in ("forward_decode", "forward_extend"):
            recorded = RECORDED[f"sglang.srt.layers.attention.{places[name]}.{function}"]
            assert list(inspect.signature(getattr(cls, function)).parameters) == recorded
            usual = list(inspect.signature(getattr(wrapper(cls), function)).parameters)
            assert usual == [*recorded[:7], "others"]
    pairs: list[tuple[str, Any]] = [
        ("layers.attention.attention_registry.register_attention_backend", sglang.register_attention_backend),
        ("layers.radix_attention.RadixAttention.__init__", sglang.RadixAttention.__init__),
        ("mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer", sglang.MHATokenToKVPool.set_kv_buffer),
        ("mem_cache.memory_pool.KVWriteLoc", sglang.KVWriteLoc),
    ]
    for path, function in pairs:
        assert list(inspect.signature(function).parameters) == RECORDED[f"sglang.srt.{path}"]
