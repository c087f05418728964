"""The table of dtypes: what shape functions say, in every dtype, and what descriptors have of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.capabilities.calls import call, kernel, spec

from layerzero.capabilities.descriptor import load
from layerzero.capabilities.match import match
from layerzero.capabilities.type_rules import computes_in, data_inputs, type_table
from layerzero.client.cli.types import summary, words
from layerzero.envs.cli.type_rows import refusal, type_rows
from layerzero.ipc.vocabulary.ops import PUBLIC_OPS
from layerzero.workers.certify.samples import samples

ROOT = Path(__file__).parents[3]
DESCRIPTORS = [load(path) for path in sorted(ROOT.glob("src/layerzero/capabilities/descriptors/*.json"))]
TABLES = {op: type_table(op, samples(op)) for op in PUBLIC_OPS}


def test_table_has_what_is_taken_and_why_the_rest_is_not() -> None:
    """Of a product of integers both may be signed or not; nothing else multiplies."""
    table = TABLES["int_matmul"]
    assert {(rule.data, rule.gives) for rule in table.rules} == {
        ((a, b), ("int32",)) for a in ("int8", "uint8") for b in ("int8", "uint8")
    }
    said = {one.dtypes: (one.found, one.allowed) for one in table.refusals}
    assert said[(("a", "int16"), ("b", "int8"))] == ("a is int16", "int8 or uint8")
    mixed = {one.dtypes: one.allowed for one in TABLES["swiglu"].refusals}
    assert mixed[(("gate", "float32"), ("up", "float16"))] == "one dtype for all"


def test_indices_are_beside_the_data() -> None:
    """A rule is of numbers that are computed with; what says where they are has dtypes of its own."""
    assert data_inputs("embedding") == ("weight",)
    assert all(sorted(rule.others["ids"]) == ["int32", "int64"] for rule in TABLES["embedding"].rules)
    masks = {rule.data[0]: set(rule.others["attn_mask"]) for rule in TABLES["attention"].rules}
    assert masks["float16"] == {"float16", "bool"}


@pytest.mark.parametrize("op", ["matmul", "linear"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2"])
def test_quantized_numbers_are_not_multiplied_without_their_scales(op: str, dtype: str) -> None:
    """The product of packed bytes means nothing; the reason says which op there is."""
    [why] = {one.allowed for one in TABLES[op].refusals if dict(one.dtypes).get(TABLES[op].data[0]) == dtype} - {
        "one dtype for all"
    }
    assert why == "floats and integers; scaled_linear takes it, with its scales"
    assert all(dtype not in rule.data for rule in TABLES[op].rules)


def test_every_dtype_of_every_descriptor_is_one_that_its_op_takes() -> None:
    """A kernel that claims what no call can have would look like more than it is."""
    idle = []
    for capability in DESCRIPTORS:
        for op, kernels in capability.ops.items():
            taken = {dtype for rule in TABLES[op].rules for dtype in rule.data} if op in TABLES else set()
            idle += [(k.kernel_id, d) for k in kernels for d in k.dtypes if taken and d not in taken]
    assert idle == []


def test_every_kernel_of_numbers_has_a_rule() -> None:
    """Else `lz types` would say that nobody has what the broker gives to it."""
    for capability in DESCRIPTORS:
        for op, kernels in capability.ops.items():
            for one in kernels:
                rules = TABLES[op].rules if op in TABLES else []
                assert not rules or any(refusal(op, one, rule) is None for rule in rules), one.kernel_id


def test_rows_say_who_serves_and_why_others_do_not() -> None:
    """In the words of the matcher that the broker has."""
    [torch] = [one for one in DESCRIPTORS if one.backend == "torch"]
    [onnx] = [one for one in DESCRIPTORS if one.backend == "onnxruntime"]
    made = type_rows(TABLES["matmul"], {"torch": torch, "onnxruntime": onnx}, {"torch.matmul": ["bfloat16"]})
    rows = {row["takes"]["a"]: row for row in made}
    assert rows["bfloat16"]["kernels"] == [{"kernel_id": "torch.matmul", "backend": "torch", "certified": True}]
    assert rows["bfloat16"]["refused"]["onnxruntime.matmul"].startswith("DTYPE_UNSUPPORTED: a is bfloat16; allowed: ")
    assert (rows["bfloat16"]["computes_in"], rows["int8"]["computes_in"]) == ("float32", "int8")
    assert (rows["uint64"]["kernels"], rows["uint64"]["computes_in"]) == ([], None)


@pytest.mark.parametrize(
    ("claimed", "dtype", "gives", "wanted"),
    [
        ("same", "float16", "float16", "float16"),
        ("float32", "float16", "float16", "float32"),
        ("float32", "float64", "float64", "float64"),
        ("float32", "float32", "float64", "float64"),
        ("float32", "int8", "bfloat16", "float32"),
        ("float32", "int8", "int8", "int8"),
        ("int32", "int8", "int32", "int32"),
    ],
)
def test_no_kernel_computes_in_less_than_its_floats(claimed: str, dtype: str, gives: str, wanted: str) -> None:
    """compute_dtype is one for all dtypes of a kernel: of float64 it says what is least."""
    assert computes_in(kernel(compute_dtype=claimed), dtype, gives) == wanted


def test_a_call_that_asks_for_float64_gets_a_kernel_that_has_it() -> None:
    """It was refused: the descriptor's float32 is of halves."""
    one = kernel(dtypes=["float64", "float16"], compute_dtype="float32")
    wide, half = spec(4, dtype="float64"), spec(4, dtype="float16")
    assert match(call("silu", wide, out=wide, compute_dtype="float64"), one) == []
    [refused] = match(call("silu", half, out=half, compute_dtype="float64"), one)
    assert "the kernel computes in float32" in str(refused)


def test_page_has_the_table() -> None:
    """What docs/types.md shows is what the shape functions say."""
    page = (ROOT / "docs" / "types.md").read_text(encoding="utf-8").partition("| op | takes | gives |")[2]
    wanted = ["| {} | {} | {} |".format(op, *words(summary(table))) for op, table in TABLES.items()]
    assert [line for line in page.splitlines() if line.startswith("| ")][1:] == wanted
