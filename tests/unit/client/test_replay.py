"""Calls made again from what is kept of them: for every op the request is that of the first call."""

from __future__ import annotations

from typing import Any

import pytest

from layerzero.client.facade import api
from layerzero.client.tools import calls, replay
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary.ops import OPS, PUBLIC_OPS

NAMES = [name for name in PUBLIC_OPS if not PUBLIC_OPS[name].sized_output]


@pytest.mark.parametrize("op", NAMES)
def test_a_call_of_every_op_is_made_again_as_it_was(op: str) -> None:
    for call in calls.DEFAULTS[op]:
        first = api.request(op, **call.arrays, **call.params)
        kept: dict[str, Any] = dict(zip(OPS[op].inputs, first.args, strict=True))
        again = replay.request_of(op, first.params, kept, "torch", 2.0)
        assert (again.op, again.args, again.params) == (first.op, first.args, first.params)
        assert again.planner(*again.args, **again.params) == first.planner(*first.args, **first.params)
        assert (again.backend, again.timeout_s) == ("torch", 2.0)


@pytest.mark.parametrize("op", ["tokenize", "no_such_op"])
def test_what_cannot_be_made_again_says_so(op: str) -> None:
    with pytest.raises(InvalidArgument, match=f"calls of {op} cannot be made again"):
        replay.request_of(op, {}, {}, None, None)
