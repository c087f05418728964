"""What a worker hands over: a lifted call with its machine code and trials, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ipc.lifting.test_form import CODE, kernel, lifted

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.lifting.form import Address, Copy, digest
from layerzero.ipc.lifting.specimen import Specimen
from layerzero.ipc.transport.plain import pack_body, unpack_body

SPECIMEN = Specimen(lifted(), {CODE: b"code"}, {1: ("abc",), -7: ("def",)})


def test_what_is_packed_comes_back() -> None:
    assert Specimen.unpack(SPECIMEN.pack()) == SPECIMEN


def test_a_call_without_kernels_needs_no_code() -> None:
    copy = Copy(Address("input", 0, 0), Address("output", 0, 0), 8)
    made = Specimen(lifted(copy), {}, {1: ("abc",)})
    assert Specimen.unpack(made.pack()) == made


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lifted", b""),
        ("lifted", None),
        ("lifted", lifted(kernel(code=digest(b"other"))).pack()),
        ("codes", []),
        ("codes", [b"code", b"more"]),
        ("codes", ["code"]),
        ("codes", None),
        ("trials", {"x": ["abc"]}),
        ("trials", {"1": []}),
        ("trials", {"1": ["abc", "def"]}),
        ("trials", {"1": [b"abc"]}),
        ("trials", {"1": [7]}),
        ("trials", {"1": ["x" * 201]}),
        ("trials", {"1": 7}),
        ("trials", [1]),
    ],
    ids=str,
)
def test_what_is_no_specimen_is_refused(key: str, value: object) -> None:
    """The broker gives it to a process that believes it."""
    wrong: dict[str, Any] = unpack_body(SPECIMEN.pack())
    for body in (wrong | {key: value}, {k: v for k, v in wrong.items() if k != key}, [key]):
        with pytest.raises(ProtocolError):
            Specimen.unpack(pack_body(body))


@given(st.binary(max_size=100))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Specimen.unpack(data)
