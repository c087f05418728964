"""client/connection/record.py: copies that a report tells of."""

from __future__ import annotations

from dataclasses import replace

from layerzero.client.connection.record import report_of
from layerzero.client.connection.report import Copy
from layerzero.client.planning.plans import Plan
from layerzero.ipc.transport.messages import Decision
from layerzero.ipc.vocabulary.tensors import TensorSpec

SPEC, EMPTY = TensorSpec.contiguous("float32", (4,)), TensorSpec.contiguous("float32", (0,))
PLAN = Plan("silu", (SPEC,), {}, (SPEC,), (SPEC,))
DECISION = Decision(
    kernel_id="a.silu", backend="a", worker_pid=1, copies_inputs=True, copies_outputs=True, candidates=[]
)


def test_copies_on_both_sides_are_in_the_report() -> None:
    """Those that a library makes in its worker cost the caller as much as those that we make here."""
    ours = Copy("x", 16, "client", "it does not lie in an arena")
    report = report_of((PLAN, [ours], 0, 1000, 500, (), DECISION, (), ""))
    assert report is not None
    assert [(copy.arg, copy.nbytes, copy.where) for copy in report.copies] == [
        ("x", 16, "client"),
        ("inputs", 16, "worker"),
        ("out", 16, "worker"),
    ]
    assert report.copied_bytes == 48


def test_nothing_is_said_of_copies_of_nothing() -> None:
    for plan, decision in (
        (PLAN, replace(DECISION, copies_inputs=False, copies_outputs=False)),
        (Plan("silu", (EMPTY,), {}, (EMPTY,), (EMPTY,)), DECISION),
    ):
        report = report_of((plan, [], 0, 1000, 500, (), decision, (), ""))
        assert report is not None
        assert (report.copies, report.copied_bytes) == ((), 0)
