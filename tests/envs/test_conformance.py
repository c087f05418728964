"""Every kernel of every backend against tests/reference.py, in its own environment: shapes, strides, dtypes, edges.

A case that the kernel's descriptor refuses is not run. Kernels of GPUs: tests/gpu/test_providers.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests import reference
from tests.envs.case import Case
from tests.envs.cases import CASES, completed, in_dtype, lay_out, memory_of, refilled, strided, strided_bytes
from tests.envs.harness import FILL, STORE, Harness, Harnesses

from layerzero.broker.processes.host import detect_cpu
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.descriptor import KernelCapability
from layerzero.capabilities.descriptor import load as load_descriptor
from layerzero.capabilities.device import DeviceSpec
from layerzero.capabilities.match import match
from layerzero.envs.build.build import ensure, resolve
from layerzero.envs.probe.probe import probe_cached
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.numerics import tolerance
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.shapes import outputs_of
from layerzero.ipc.vocabulary.tensors import FLOAT_DTYPES, TensorSpec

FOLDER = Path(__file__).parents[2] / "src" / "layerzero" / "capabilities" / "descriptors"
DESCRIPTORS = [path for path in sorted(FOLDER.glob("*.json")) if load_descriptor(path).platform == "cpu"]
# What a library has for some CPUs only; elsewhere its probe certifies the rest.
NEEDED = {("zentorch.linear", "bfloat16"): "avx512_bf16", ("zentorch.gated_mlp", "bfloat16"): "avx512_bf16"}
LACKING = {made for made, isa in NEEDED.items() if isa not in detect_cpu().isa}
MIN_RUN = 8  # cases per kernel; fewer mean that the descriptor refuses what the cases cover


def kernels() -> Iterator[tuple[str, str, KernelCapability]]:
    for path in DESCRIPTORS:
        capability = load_descriptor(path)
        for op, listed in capability.ops.items():
            for kernel in listed:
                yield capability.backend, op, kernel


TENSOR_KERNELS = [
    pytest.param(backend, op, kernel, dtype, id=f"{kernel.kernel_id}-{dtype}")
    for backend, op, kernel in kernels()
    for dtype in kernel.dtypes
]


class Refused(Exception):
    """The descriptor does not admit this case."""


def check(harness: Harness, op: str, kernel: KernelCapability, dtype: str, case: Case) -> str | None:
    """Run one case, on its values and then on others in the same memory. None when right, else what is wrong.

    Raises Refused when the descriptor does not admit the case.
    """
    if dtype not in FLOAT_DTYPES and not all(np.isfinite(v).all() for v in case.tensors if v is not None):
        raise Refused
    layouts = (*case.layouts, *["contiguous"] * len(case.tensors))[: len(case.tensors)]
    specs: list[TensorSpec | None] = []
    sets: list[list[bytes]] = [[], []]
    arguments: list[list[reference.Array | None]] = [[], []]
    others = [None if v is None else refilled(name, v) for name, v in zip(OPS[op].inputs, case.tensors, strict=True)]
    first, second = (completed(op, values, case.attrs, dtype) for values in (case.tensors, others))
    for argument_name, values, other, layout in zip(OPS[op].inputs, first, second, layouts, strict=True):
        if values is None:
            specs.append(None)
            for argument in arguments:
                argument.append(None)
            continue
        for content, argument, blobs in zip((values, other), arguments, sets, strict=True):
            kind = "float32" if argument_name in OPS[op].singles else case.kinds.get(argument_name, dtype)
            name, exact = in_dtype(content, kind)
            spec, view = lay_out(exact, name, layout)
            argument.append(reference.from_bits(view, name))
            blobs.append(memory_of(spec, view))
        specs.append(spec)
    try:
        shapes = outputs_of(op, specs, case.attrs)
    except InvalidArgument as exc:  # no call: the op has it for other dtypes
        raise Refused from exc
    results = [reference.TENSOR_OPS[op](*argument, **case.attrs, **case.told) for argument in arguments]
    expected = [result if isinstance(result, tuple) else (result,) for result in results]
    places = [OPS[op].inputs.index(name) for name in OPS[op].in_place]
    outs = [spec for i in places if (spec := specs[i])] or [
        lay_out(result, made, "contiguous" if name == "lse" else case.out_layout)[0]
        for name, result, (made, _) in zip(OPS[op].outputs, expected[0], shapes, strict=True)
    ]
    if match(SelectionContext(op, tuple(specs), tuple(outs), case.attrs, DeviceSpec()), kernel):
        raise Refused
    answer, written = harness.run(kernel.kernel_id, op, specs, outs, case.attrs, sets)
    if "error" in answer:
        return f"{answer['error']['code']}: {answer['error']['message']:.300}"
    for attempt, wants, blobs in zip(("first run", "run on refilled memory"), expected, sets, strict=True):
        before = [blobs[i] for i in places] or [bytes([FILL]) * out.span_bytes for out in outs]
        for out, want, old in zip(outs, wants, before, strict=True):
            data = written.pop(0)
            wrong = reference.error(reference.from_bits(strided(data, out), out.dtype), want)
            if not wrong <= (allowed := tolerance(out.dtype if len(outs) == 1 or places else dtype, op, out.dtype)):
                return f"{attempt}: error {wrong:.3g}, allowed {allowed:g}"
            owned = np.zeros(len(data), bool)
            strided_bytes(owned, out)[...] = True
            if not np.array_equal(*(np.frombuffer(memory, np.uint8)[~owned] for memory in (data, old))):
                return f"{attempt}: wrote between the elements of the output"
    return None


@pytest.mark.parametrize(("backend", "op", "kernel", "dtype"), TENSOR_KERNELS)
def test_kernel_gives_the_reference_result(
    harnesses: Harnesses, backend: str, op: str, kernel: KernelCapability, dtype: str
) -> None:
    """A kernel that is wrong for a call its descriptor admits corrupts a model silently."""
    if (kernel.kernel_id, dtype) in LACKING:
        pytest.skip("the library has it for CPUs with other instruction sets")
    wrong, ran = {}, 0
    for case in CASES[op](np.random.default_rng(20)):
        try:
            problem = check(harnesses[backend], op, kernel, dtype, case)
        except Refused:
            continue
        ran += 1
        if problem is not None:
            wrong[case.name] = problem
    assert not wrong, f"{len(wrong)} of {ran} cases: {json.dumps(wrong, indent=1)}"
    assert ran >= MIN_RUN


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_cross_entropy_names_the_index_of_no_class(harnesses: Harnesses, backend: str) -> None:
    """And takes any number for the index that does not count."""
    specs = [TensorSpec.contiguous("float32", (3, 4)), TensorSpec.contiguous("int64", (3,)), None]
    attrs = {"ignore_index": 7, "reduction": "mean", "label_smoothing": 0.0}
    for bad in (7, 4, -1):
        data = [np.zeros((3, 4), "f4").tobytes(), np.array([0, bad, 3]).tobytes()]
        out = TensorSpec.contiguous("float32", ())
        answer, found = harnesses[backend].run(f"{backend}.cross_entropy", "cross_entropy", specs, [out], attrs, [data])
        if bad == 7:
            assert np.frombuffer(found[0], "f4")[0] == pytest.approx(np.log(4))
        else:
            assert answer["error"]["code"] == "INVALID_ARGUMENT"
            assert f"target has the index {bad}; allowed: 0 to 3" in answer["error"]["message"]


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("bad", [-1, 11, 2**31 - 1])
def test_embedding_names_the_id_outside_the_table(harnesses: Harnesses, backend: str, bad: int) -> None:
    """Reading past the table would return other tensors' memory."""
    ids, weight = TensorSpec.contiguous("int32", (3,)), TensorSpec.contiguous("float32", (11, 2))
    data = [np.array([0, bad, 10], np.int32).tobytes(), bytes(88)]
    out = TensorSpec.contiguous("float32", (3, 2))
    answer, _ = harnesses[backend].run(f"{backend}.embedding", "embedding", [ids, weight], [out], {}, [data])
    assert answer["error"]["code"] == "INVALID_ARGUMENT"
    assert f"check the ids of embedding: {bad} is outside [0, 11)" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ([1, 2, 4], "cu_seqlens_q is [1, 2, 4]; allowed: from 0 up to 4"),
        ([0, 5, 4], "and never down"),
        ([0, 2, 5], "up to 4, the number of tokens"),
    ],
)
def test_attention_varlen_names_the_ends_that_are_none(harnesses: Harnesses, ends: list[int], says: str) -> None:
    """Keys of another sequence, or of other memory, would be attended to."""
    tokens, ends_spec = TensorSpec.contiguous("float32", (4, 1, 2)), TensorSpec.contiguous("int32", (3,))
    data = [*[bytes(32)] * 3, np.array(ends, np.int32).tobytes(), np.array([0, 2, 4], np.int32).tobytes()]
    specs: list[TensorSpec | None] = [tokens, tokens, tokens, ends_spec, ends_spec]
    attrs = {"is_causal": False, "scale": 1.0, "causal_alignment": "top_left"}
    answer, _ = harnesses["torch"].run("torch.attention_varlen", "attention_varlen", specs, [tokens], attrs, [data])
    assert answer["error"]["code"] == "INVALID_ARGUMENT"
    assert says in answer["error"]["message"]


@pytest.mark.parametrize(
    ("table", "length", "says"),
    [
        ([3, 0], 1, "block 3 of sequence 0 is outside [0, 3)"),
        ([0, -1], 5, "block -1 of sequence 0"),
        ([0, 1], 9, "seq_lens[0] is 9; allowed: 0 to 8"),
        ([0, 1], -1, "seq_lens[0] is -1"),
    ],
)
def test_paged_attention_names_the_block_or_length_outside_the_cache(
    harnesses: Harnesses, table: list[int], length: int, says: str
) -> None:
    """Another sequence's keys, or other memory, would be read."""
    q, cache = TensorSpec.contiguous("float32", (1, 1, 2)), TensorSpec.contiguous("float32", (3, 4, 1, 2))
    where: list[TensorSpec | None] = [TensorSpec.contiguous("int32", (1, 2)), TensorSpec.contiguous("int32", (1,))]
    data = [bytes(8), bytes(96), bytes(96), np.array(table, np.int32).tobytes(), np.array([length], np.int32).tobytes()]
    answer, _ = harnesses["torch"].run(
        "torch.paged_attention", "paged_attention", [q, cache, cache, *where], [q], {"scale": 1.0}, [data]
    )
    assert answer["error"]["code"] == "INVALID_ARGUMENT"
    assert says in answer["error"]["message"]


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_append_kv_names_the_slot_outside_the_cache_and_writes_nothing(harnesses: Harnesses, backend: str) -> None:
    """It would land in other memory; half of an append would leave keys that no table leads to."""
    rows, cache = TensorSpec.contiguous("float32", (2, 1, 2)), TensorSpec.contiguous("float32", (3, 4, 1, 2))
    data = [b"\1" * 16, b"\1" * 16, bytes(96), bytes(96), np.array([3, 12], np.int64).tobytes()]
    specs: list[TensorSpec | None] = [rows, rows, cache, cache, TensorSpec.contiguous("int64", (2,))]
    kernel = f"{backend}.append_kv"
    answer, written = harnesses[backend].run(kernel, "append_kv", specs, [cache, cache], {}, [data])
    assert answer["error"]["code"] == "INVALID_ARGUMENT"
    assert "slot 12 is outside [0, 12), the 3 blocks of 4" in answer["error"]["message"]
    assert not any(map(any, written))


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ([(0, 3)], "block 3 is outside [0, 3), the blocks of the caches; check targets"),
        ([(7, 1), (0, -1)], "block 7 is outside [0, 3), the blocks of the caches; check sources"),
        ([(0, 1), (1, 2)], "block 1 is the target of one pair and the source of another"),
    ],
)
def test_copied_blocks_that_do_not_fit_are_named_and_nothing_is_written(
    harnesses: Harnesses, backend: str, pairs: list[tuple[int, int]], says: str
) -> None:
    """A call whose sources it changes itself could not be run again after a worker's death."""
    cache, places = TensorSpec.contiguous("float32", (3, 2, 1, 2)), TensorSpec.contiguous("int64", (len(pairs),))
    data = [
        bytes(range(48)),
        bytes(range(48)),
        *(np.array(one, np.int64).tobytes() for one in zip(*pairs, strict=True)),
    ]
    specs: list[TensorSpec | None] = [cache, cache, places, places]
    kernel = f"{backend}.copy_kv_blocks"
    answer, written = harnesses[backend].run(kernel, "copy_kv_blocks", specs, [cache, cache], {}, [data])
    assert answer["error"]["code"] == "INVALID_ARGUMENT"
    assert says in answer["error"]["message"]
    assert all(bytes(one) == data[0] for one in written)


def test_provider_has_the_kernels_of_its_descriptor(harnesses: Harnesses) -> None:
    """A kernel without a descriptor would never be chosen, a descriptor without its kernel fails every call."""
    claimed: dict[str, list[str]] = {}
    for backend, _, kernel in kernels():
        claimed.setdefault(backend, []).append(kernel.kernel_id)
    found = {backend: harnesses[backend].kernels for backend in claimed}
    assert found == {backend: sorted(ids) for backend, ids in claimed.items()}


@pytest.mark.parametrize("backend", [path.stem for path in DESCRIPTORS])
def test_environment_passes_its_probe(backend: str) -> None:
    """The probe certifies what we ship; it must pass where this whole file does. Where `make envs` has probed just this
    code in just this environment, that is the verdict."""
    manifest = resolve(backend)
    record = probe_cached(ensure(manifest, store=STORE), manifest)
    failed = {(failure["kernel_id"], failure["dtype"]) for failure in record.failures}
    assert (record.ok, record.message) == (True, "")
    assert failed <= LACKING
