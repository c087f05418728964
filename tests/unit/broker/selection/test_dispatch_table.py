"""broker/selection/dispatch_table.py: what a table answers, where it stays silent, and when it is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.example_counts import examples

from layerzero.broker.selection import dispatch_table as tables
from layerzero.broker.selection.dispatch_table import Hardware, Header, Leaf, Measurement, Split
from layerzero.capabilities.context import SelectionContext
from layerzero.capabilities.device import DeviceSpec
from layerzero.ipc.errors import ConfigError, InvalidArgument
from layerzero.ipc.vocabulary.tensors import TensorSpec

DEVICE = DeviceSpec(device_uuid="cpu-1", isa=("avx2", "fma"))
CONDITIONS: dict[str, Any] = {
    "hardware": {"cpu": Hardware.of(DEVICE)},
    "capability_hashes": {"alpha": "a1", "beta": "b1"},
    "env_ids": {"alpha": "alpha-1", "beta": "beta-1"},
    "layerzero_version": "0.1.0",
}
HEADER = Header(created="2026-01-01T00:00:00+00:00", command="lz solve silu 8:float32 --out t.json", **CONDITIONS)


def on_cpu(**hardware: Any) -> dict[str, Any]:
    return {"hardware": {"cpu": Hardware(**hardware)}}


def gpu(name: str = "NVIDIA H200", uuid: str = "GPU-1", driver: str = "580") -> DeviceSpec:
    return DeviceSpec("cuda", name, "nvidia", uuid, sm_version=90, driver_version=driver)


def silu(*shape: int, dtype: str = "float32", device: DeviceSpec = DEVICE) -> SelectionContext:
    spec = TensorSpec.contiguous(dtype, shape)
    return SelectionContext("silu", (spec,), (spec,), {}, device)


def measured(context: SelectionContext, us: Mapping[str, float]) -> Measurement:
    place = tables.place_of(context.device)
    return Measurement(tables.group_of(context), tables.features_of(context), us, place)


def load(text: str, **changes: Any) -> tables.DispatchTable:
    return tables.load(text, "t.json", **{**CONDITIONS, **changes})


extents = st.integers(0, 1 << 20)
times = st.dictionaries(
    st.sampled_from(["a.k", "b.k", "c.k"]), st.sampled_from([1.0, 1.01, 2.0, 3.5, 70.0]), min_size=1
)
samples = st.dictionaries(st.tuples(extents, extents), times, min_size=1, max_size=40)


@given(samples)
def test_every_measured_call_finds_its_fastest_kernel(points: dict[tuple[int, int], dict[str, float]]) -> None:
    """Or one that is as fast but for noise; anything else would make the table worse than its data."""
    table = tables.build((measured(silu(*shape), us) for shape, us in points.items()), HEADER)
    for shape, us in points.items():
        kernel_id = table.lookup(silu(*shape))
        assert kernel_id is not None
        assert us[kernel_id] <= (1 + tables.TIE_SHARE) * min(us.values())


@given(samples)
def test_a_table_reads_back_as_it_was_written(points: dict[tuple[int, int], dict[str, float]]) -> None:
    """The broker that loads it must decide as the one that made it."""
    table = tables.build((measured(silu(*shape), us) for shape, us in points.items()), HEADER)
    assert load(table.save()) == table


@given(samples)
def test_neighbouring_buckets_with_the_same_winner_are_one(points: dict[tuple[int, int], dict[str, float]]) -> None:
    """A split that decides nothing costs time and hides what matters."""
    table = tables.build((measured(silu(*shape), us) for shape, us in points.items()), HEADER)
    for group in table.trees:
        for number, node in enumerate(group.nodes):
            if isinstance(node, Split):
                pair = group.nodes[number + 1], group.nodes[node.otherwise]
                assert not (isinstance(pair[0], Leaf) and pair[0] == pair[1])


TEXT = tables.build(
    [
        measured(silu(8, 64), {"alpha.silu": 1.0, "beta.silu": 2.0}),
        measured(silu(8, 1024), {"alpha.silu": 9.0, "beta.silu": 4.0}),
        measured(silu(8, 64, dtype="float16"), {"beta.silu": 2.0}),
    ],
    HEADER,
).save()


@settings(max_examples=examples(300))
@given(st.integers(0, len(TEXT) - 1), st.characters(codec="utf-8"))
def test_a_changed_file_is_refused(place: int, character: str) -> None:
    """A flipped bit must not route production calls. White space alone changes nothing."""
    changed = TEXT[:place] + character + TEXT[place + 1 :]
    try:
        is_same = json.loads(changed) == json.loads(TEXT)
    except ValueError:
        is_same = False
    if is_same:
        assert tables.parse(changed, "t.json") == tables.parse(TEXT, "t.json")
    else:
        with pytest.raises(ConfigError, match=r"t\.json"):
            tables.parse(changed, "t.json")


@pytest.mark.parametrize(
    ("context", "kernel_id"),
    [
        (silu(8, 64), "alpha.silu"),
        (silu(8, 32), "alpha.silu"),
        (silu(16, 128), "alpha.silu"),
        (silu(8, 2048), "beta.silu"),
        (silu(8, 512), "beta.silu"),
        (silu(8, 31), None),
        (silu(8, 2049), None),
        (silu(8, 200), None),
        (silu(17, 64), None),
        (silu(8, 0), None),
        (silu(64), None),
        (silu(8, 64, dtype="float64"), None),
    ],
)
def test_a_call_is_served_within_a_factor_of_two_of_a_measured_one(
    context: SelectionContext, kernel_id: str | None
) -> None:
    """Farther away, the measurement says nothing about the call."""
    assert load(TEXT).lookup(context) == kernel_id


def test_other_layouts_and_attributes_are_other_calls() -> None:
    """A kernel that wins on row-major data may lose on columns."""
    spec, strided = TensorSpec.contiguous("float32", (8, 64)), TensorSpec("float32", (8, 64), (1, 8))
    contexts = [
        SelectionContext("softmax", (one,), (spec,), {"dim": dim, "dtype": ""}, DEVICE)
        for one, dim in ((spec, 0), (spec, 1), (strided, 0))
    ]
    table = tables.build(
        [measured(context, {f"k{number}": 1.0}) for number, context in enumerate(contexts)],
        HEADER,
    )
    assert [table.lookup(context) for context in contexts] == ["k0", "k1", "k2"]
    assert (len(table.trees), table.buckets) == (3, 3)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"hardware": {"cpu": Hardware(device_uuid="cpu-2", isa=("avx2", "fma"))}},
            "device_uuid: table cpu-1, here cpu-2",
        ),
        (on_cpu(device_uuid="cpu-1", isa=("avx2",)), r"isa: table avx2\+fma, here avx2"),
        (on_cpu(device_uuid="cpu-1", isa=("avx2", "fma"), sm=90), "sm: table none, here 90"),
        ({"capability_hashes": {"alpha": "a1", "beta": "b2"}}, "descriptor of beta: table b1, here b2"),
        ({"env_ids": {"beta": "beta-1"}}, "environment of alpha: table alpha-1, here none"),
        ({"layerzero_version": "0.2.0"}, r"layerzero version: table 0\.1\.0, here 0\.2\.0"),
    ],
)
def test_a_table_of_other_conditions_is_refused_with_each_difference(changes: dict[str, Any], line: str) -> None:
    """Its times hold nowhere else, and the reader must see what to do."""
    with pytest.raises(ConfigError, match=line) as caught:
        load(TEXT, **changes)
    assert "make it anew: lz solve silu 8:float32 --out t.json" in caught.value.message
    assert caught.value.message.count("table ") == 2  # the headline, and one difference


def test_a_backend_that_came_later_does_not_void_a_table() -> None:
    """The kernels that were measured are as fast as before."""
    load(TEXT, capability_hashes={**CONDITIONS["capability_hashes"], "gamma": "g1"})


def resign(change: Mapping[str, Any]) -> str:
    """A file with changed content and a checksum that fits it."""
    content = json.loads(TEXT)
    group = next(iter(content["groups"]["cpu"].values()))
    group.update(change)
    del content["checksum"]
    return json.dumps({**content, "checksum": tables._checksum(content)})


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": []},
        {"nodes": [{"feature": 0, "below": 2, "otherwise": 1}]},
        {"nodes": [{"feature": 0, "below": 2, "otherwise": 2}, {"kernel_id": "a"}]},
        {"nodes": [{"feature": 9, "below": 2, "otherwise": 2}, {"kernel_id": "a"}, {"kernel_id": "b"}]},
        {"nodes": [{"kernel_id": "a"}, {"kernel_id": "b"}]},
        {"points": [{"extents": [8], "us": {"a": 1.0}}]},
        {"points": [{"extents": [8, 64], "us": {}}]},
        {"points": [{"extents": [8, 64], "us": {"a": -1.0}}]},
        {"winner": "a"},
    ],
)
def test_a_signed_file_that_is_no_table_is_refused(change: dict[str, Any]) -> None:
    """A checksum says that nothing was damaged, not that it was right: a lookup must end, and end at a kernel."""
    with pytest.raises(ConfigError, match="not a dispatch table"):
        tables.parse(resign(change), "t.json")


def test_measurements_that_cannot_be_used_are_refused() -> None:
    """A table of nothing, of negative times or of more than a broker reads in a moment."""
    with pytest.raises(InvalidArgument, match="0 different calls"):
        tables.build([], HEADER)
    with pytest.raises(InvalidArgument, match="greater than 0"):
        tables.build([measured(silu(8), {"a.k": 0.0})], HEADER)
    with pytest.raises(InvalidArgument, match="features"):
        tables.build([Measurement("g", {"x.0": 1}, {"a": 1.0}), Measurement("g", {"y.0": 1}, {"a": 1.0})], HEADER)


def test_of_a_call_measured_twice_the_less_disturbed_time_counts() -> None:
    """Another process's load makes times longer, never shorter."""
    table = tables.build(
        [measured(silu(8), {"a.k": 9.0, "b.k": 5.0}), measured(silu(8), {"a.k": 3.0, "b.k": 6.0})], HEADER
    )
    assert table.lookup(silu(8)) == "a.k"


def test_each_sort_of_device_has_calls_of_its_own() -> None:
    """GPUs of one name are alike; of a device that was not measured the table says nothing."""
    devices = (DEVICE, gpu())
    header = HEADER.model_copy(update={"hardware": tables.hardware_of(devices)})
    points = [measured(silu(8, 8, device=device), {f"{device.device_type}.k": 1.0}) for device in devices]
    table = tables.build(points, header)
    assert load(table.save(), hardware=tables.hardware_of(devices)) == table
    assert table.lookup(silu(8, 8)) == "cpu.k"
    assert table.lookup(silu(8, 8, device=gpu(uuid="GPU-2"))) == "cuda.k"
    assert (len(table.trees), table.buckets) == (2, 2)
    for device, covers in ((DEVICE, True), (gpu(uuid="GPU-2"), True), (gpu("NVIDIA A100"), False)):
        assert table.covers(device) == covers
    assert table.lookup(silu(8, 8, device=gpu("NVIDIA A100"))) is None


@pytest.mark.parametrize(
    ("here", "line"),
    [
        ((DEVICE,), "devices: table cuda NVIDIA H200 sm_90, here cpu"),
        ((DEVICE, gpu("NVIDIA A100")), "devices: table cuda NVIDIA H200 sm_90, here cpu, cuda NVIDIA A100 sm_90"),
        ((DEVICE, gpu(driver="590")), "cuda NVIDIA H200 sm_90: driver: table 580, here 590"),
    ],
)
def test_a_table_of_a_gpu_is_refused_where_there_is_none_such(here: tuple[DeviceSpec, ...], line: str) -> None:
    """Its choices were the reason to name it: without a word they would be gone."""
    header = HEADER.model_copy(update={"hardware": tables.hardware_of([gpu()])})
    text = tables.build([measured(silu(8, device=gpu()), {"a": 1.0})], header).save()
    with pytest.raises(ConfigError) as caught:
        load(text, hardware=tables.hardware_of(here))
    assert f"\n  {line}\n" in str(caught.value)


def first_version(text: str) -> str:
    """The same table as version 0.1 wrote it: of the CPU, and nothing else."""
    content = json.loads(text)
    [hardware] = content["header"]["hardware"].values()
    [groups] = content["groups"].values()
    del content["checksum"], hardware["device_name"]
    content |= {"schema_version": "1.0", "groups": groups, "header": {**content["header"], "hardware": hardware}}
    return json.dumps({**content, "checksum": tables._checksum(content)})


def test_a_file_of_the_first_version_is_read() -> None:
    """It was measured with care, and nothing in it is wrong."""
    old = first_version(TEXT)
    assert load(old) == load(TEXT)
    assert not load(old).covers(gpu())
    with pytest.raises(ConfigError, match="device_uuid: table cpu-1, here cpu-2"):
        load(old, hardware={"cpu": Hardware(device_uuid="cpu-2", isa=("avx2", "fma"))})
    with pytest.raises(ConfigError, match="changed or damaged"):
        load(old.replace("2026", "2027"))
    with pytest.raises(ConfigError, match="not a dispatch table"):
        load(old.replace('"1.0"', '"3.0"'))


def test_calls_and_hardware_of_a_file_belong_together() -> None:
    """Calls of a device without its driver would hold whatever the driver is."""
    content = json.loads(TEXT)
    content["groups"]["cuda X sm_90"] = content["groups"]["cpu"]
    del content["checksum"]
    with pytest.raises(ConfigError, match="hardware without calls, or calls without hardware"):
        tables.parse(json.dumps({**content, "checksum": tables._checksum(content)}), "t.json")
