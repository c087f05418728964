"""What is added to measured times: plans of lengths that grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerzero.broker.selection.ranking import Engine
from layerzero.broker.selection.signature import CallSpec, Verdict
from layerzero.capabilities import descriptor
from layerzero.capabilities.device import DeviceSpec
from layerzero.client.planning.attention_plans import plan_attention
from layerzero.ipc.transport.messages import Route, encode
from layerzero.ipc.vocabulary.tensors import TensorSpec

FOLDER = Path(descriptor.__file__).parent / "descriptors"
CUDA = {name: descriptor.load(FOLDER / f"{name}.json") for name in ("cudnn", "torch-cuda")}
GPU = DeviceSpec(
    device_type="cuda",
    sm_version=90,
    device_uuid="GPU-1",
    device_name="NVIDIA H200",
    memory_bytes=140 << 30,
    supports_bf16=True,
    supports_fp16=True,
    supports_graphs=True,
)
CUDNN = {"cudnn.attention", "cudnn.attention.wide", "torch-cuda.attention.cudnn", "torch-cuda.attention.cudnn_wide"}


def call(queries: int, keys: int, *, has_mask: bool = False) -> CallSpec:
    """Of a decoder with 32 heads on 8."""
    q = TensorSpec.contiguous("bfloat16", (1, 32, queries, 128))
    k = TensorSpec.contiguous("bfloat16", (1, 8, keys, 128))
    mask = TensorSpec.contiguous("bool", (1, 1, queries, keys)) if has_mask else None
    plan = plan_attention(q, k, k, mask, is_causal=queries > 1, scale=None, enable_gqa=True)
    inputs = [None if spec is None else spec.to_wire() for spec in plan.inputs]
    outputs = [spec.to_wire() for spec in plan.outputs]
    return CallSpec.parse(
        encode(Route(op="attention", inputs=inputs, outputs=outputs, attrs=dict(plan.attrs), device="GPU-1"))
    )


def ranked(engine: Engine, spec: CallSpec) -> list[Verdict]:
    return [v for v in engine.rank(spec, engine.context(spec), {}, 0.0) if v.is_accepted]


@pytest.fixture
def engine() -> Engine:
    return Engine(CUDA, DeviceSpec(), gpus=[GPU])


def test_a_decoders_attention_is_not_planned_for_each_length(engine: Engine) -> None:
    """Whether or not what plans was measured, and is the faster kernel."""
    spec = call(1, 700)
    first, *others = ranked(engine, spec)
    assert first.kernel_id == "torch-cuda.attention.flash"
    assert CUDNN & {v.kernel_id for v in others}
    cell = engine.cell(engine.context(spec))
    for kernel_id, us in ((first.kernel_id, 28.0), ("torch-cuda.attention.cudnn", 21.0)):
        for _ in range(3):
            engine.note_time(kernel_id, cell, round(us * 1e3), 0.0, is_clean=True)
    first, *others = ranked(engine, spec)
    assert first.kernel_id == "torch-cuda.attention.flash"
    cudnn = next(v for v in others if v.kernel_id == "torch-cuda.attention.cudnn")
    assert any("plans each length anew: 937.5 us more a call" in note for note in cudnn.notes)


def test_what_is_planned_anew_and_not_lifted_pays_for_both(engine: Engine) -> None:
    spec = call(1, 700)
    engine.note_staying("torch-cuda.attention.cudnn", engine.cell(engine.context(spec)), "NOT_CAPTURABLE")
    cudnn = next(v for v in ranked(engine, spec) if v.kernel_id == "torch-cuda.attention.cudnn")
    assert any("plans each length anew: 937.5 us more" in note for note in cudnn.notes)
    assert any("is not lifted (NOT_CAPTURABLE): 300 us more" in note for note in cudnn.notes)


def test_change_of_processes_costs_what_was_measured(engine: Engine) -> None:
    """The note says whence the figure is."""
    spec = call(1, 700)
    engine.note_staying("torch-cuda.attention.cudnn", engine.cell(engine.context(spec)), "NOT_CAPTURABLE")

    def note() -> str:
        cudnn = next(v for v in ranked(engine, spec) if v.kernel_id == "torch-cuda.attention.cudnn")
        return next(note for note in cudnn.notes if "is not lifted" in note)

    assert note().endswith(
        "300 us more, in which the GPU changes to its worker and back (by default, not measured here)"
    )
    engine.note_switch(spec.device, 42.5)
    assert note().endswith("85 us more, in which the GPU changes to its worker and back (measured on this GPU)")


@pytest.mark.parametrize("spec", [call(700, 700), call(1, 700, has_mask=True)], ids=["prompt", "static cache"])
def test_lengths_that_stay_have_no_such_price(engine: Engine, spec: CallSpec) -> None:
    first = ranked(engine, spec)[0]
    assert first.terms.get("new_length") is None
    assert not any("plans each length" in note for v in ranked(engine, spec) for note in v.notes)
