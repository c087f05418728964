"""Plans of a broker as a worker reads them: none reaches the shape functions, or a kernel, with other tensors than its
op has."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.transport.messages import Prepare, encode
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.workers.prepared import read_call

Q, PAGES = ["float32", [1, 2, 8], [16, 8, 1]], ["float32", [4, 16, 2, 8], [256, 16, 8, 1]]
PAGED = [Q, PAGES, PAGES, ["int32", [1, 4], [4, 1]], ["int32", [1], [1]], None, None]


def plan(**fields: Any) -> bytes:
    given = {"op": "paged_attention", "kernel_id": "k", "inputs": PAGED, "outputs": [Q], "attrs": {"scale": 1.0}}
    return encode(Prepare(**{**given, **fields}, device="", is_graph_safe=False))


def test_a_plan_is_read() -> None:
    _, call = read_call(plan())
    assert (len(call.inputs), len(call.outputs)) == (len(OPS["paged_attention"].inputs), 1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"inputs": PAGED[:5]}, "other tensors or attributes"),
        ({"inputs": [*PAGED, None]}, "other tensors or attributes"),
        ({"outputs": []}, "other tensors or attributes"),
        ({"outputs": [Q, Q]}, "other tensors or attributes"),
        ({"attrs": {}}, "other tensors or attributes"),
        ({"op": "pagination"}, "a plan of 'pagination'"),
        ({"inputs": [None, *PAGED[1:]]}, "lacks a tensor"),
        ({"inputs": [Q, PAGES, Q, *PAGED[3:]]}, "should have refused: .*v_cache"),
        ({"inputs": [*PAGED[:5], ["float32", [1], [1]], None]}, "should have refused: .*v_scale is left out"),
    ],
)
def test_a_plan_of_other_tensors_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        read_call(plan(**fields))
