"""broker/selection/certification.py and broker/selection/shadow.py: who may serve a class, and when that ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from layerzero.broker.selection.certification import Certification, Subject
from layerzero.broker.selection.shadow import LIMIT, MAX_SUBJECTS, WINDOW, Comparison, ShadowLedger
from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.vocabulary.tensors import TensorSpec

SMALL, LONG = "plain/small/dense", "plain/long/dense"
FAILURE = {
    "kernel_id": "toy.silu",
    "dtype": "float32",
    "shape_class": LONG,
    "case": "[2, 3, 96]",
    "error": 0.001,
    "tolerance": 1e-5,
    "detail": "error 0.001, allowed 1e-05",
}
SUBJECT = Subject("toy.silu", "float32", SMALL)


def record(**changes: Any) -> ProbeRecord:
    facts: dict[str, Any] = {
        "kernels": {"toy.silu": {}, "toy.gelu": {}},
        "certified": {"toy.silu": {"float32": {SMALL: 1e-7}}},
        "failures": [FAILURE],
    }
    return ProbeRecord(env="toy", key="k", ok=True, seconds=0.1, **{**facts, **changes})


@pytest.fixture
def probed() -> Certification:
    return Certification({"toy": record()})


def call(numel: int, dtype: str = "float32") -> CallSpec:
    spec = TensorSpec.contiguous(dtype, (numel,))
    return CallSpec("silu", (spec,), (spec,), {}, "")


def test_probe_says_nothing_of_the_kernels_of_others() -> None:
    """A probe's process is a foreign library's: else one package could certify, or ban, the kernels of all."""
    owners = {"toy.silu": "toy", "other.silu": "other"}
    liar = record(
        kernels={"toy.silu": {}, "other.silu": {}},
        certified={"toy.silu": {"float32": {SMALL: 1e-7}}, "other.silu": {}},
        failures=[{**FAILURE, "kernel_id": "other.silu"}],
    )
    heard = Certification({}).owned_by(owners).with_record(liar)
    assert heard.rejection("toy.silu", call(7)) is None
    assert not heard.is_known("other.silu")
    assert heard.rejection("other.silu", call(7)) is None


def test_certified_class_is_served(probed: Certification) -> None:
    """Nothing is refused that was shown to be right."""
    assert probed.rejection("toy.silu", call(7)) is None


@pytest.mark.parametrize(
    ("kernel_id", "spec", "detail"),
    [
        (
            "toy.silu",
            call(576),
            "float32 of class plain/long/dense: error 0.001, allowed 1e-05 (case '[2, 3, 96]')",
        ),
        ("toy.silu", call(7, "float16"), "float16 of class plain/small/dense: no case of the probe covers it"),
        ("toy.gelu", call(7), "float32 of class plain/small/dense: no case of the probe covers it"),
    ],
)
def test_refusal_names_class_dtype_error_and_tolerance(
    probed: Certification, kernel_id: str, spec: CallSpec, detail: str
) -> None:
    """The reader of a report must see what went wrong without running the probe again."""
    assert probed.rejection(kernel_id, spec) == Rejection(Reason.NOT_CERTIFIED, detail)


def test_kernel_that_no_probe_has_seen_may_be_chosen() -> None:
    """Choosing it is what starts the probe; its worker serves after that."""
    assert Certification({}).rejection("toy.silu", call(576)) is None


def test_new_probe_replaces_the_old_one(probed: Certification) -> None:
    """A repaired environment must not be held to what it was."""
    repaired = record(certified={"toy.silu": {"float32": {SMALL: 0.0, LONG: 0.0}}}, failures=[])
    assert probed.with_record(repaired).rejection("toy.silu", call(576)) is None
    assert probed.rejection("toy.silu", call(576)) is not None, "a value does not change"


def test_quarantine_ends_with_a_repair_of_its_backend(probed: Certification) -> None:
    """Evidence of a wrong result outweighs a certificate, and outlives a probe."""
    subject = Subject.of("toy.silu", call(7))
    quarantined = probed.with_quarantine(subject, "evidence").with_record(record())
    detail = "float32 of class plain/small/dense: quarantined, evidence"
    assert quarantined.rejection("toy.silu", call(7)) == Rejection(Reason.NOT_CERTIFIED, detail)
    assert quarantined.quarantined == {subject: "evidence"}
    assert quarantined.without_quarantine(["other"]).rejection("toy.silu", call(7)) is not None
    assert quarantined.without_quarantine(["toy.silu"]).rejection("toy.silu", call(7)) is None


def test_own_probe_is_believed_about_its_failures() -> None:
    """The reason of a refusal is in them."""
    owned = Certification({"toy": record()}, owners={"toy.silu": "toy", "toy.gelu": "toy"})
    rejection = owned.rejection("toy.silu", call(576))
    assert rejection is not None
    assert "error 0.001, allowed 1e-05" in rejection.detail
    assert owned.judge(Subject("toy.gelu", "float32", SMALL)) is not None, "seen, and certified for nothing"


def test_failure_that_a_probe_tells_of_the_kernels_of_others_is_no_reason() -> None:
    """Only their own probe says why they are refused."""
    liar = ProbeRecord("liar", "k", ok=True, seconds=0.1, kernels={}, certified={}, failures=[FAILURE])
    owners = {"toy.silu": "toy", "toy.gelu": "toy"}
    heard = Certification({"toy": record(failures=[]), "liar": liar}, owners=owners)
    rejection = heard.rejection("toy.silu", call(576))
    assert rejection is not None
    assert rejection.detail == "float32 of class plain/long/dense: no case of the probe covers it"


def test_quarantines_stay_when_owners_are_told_and_others_take_their_place() -> None:
    quarantined = Certification({}).with_quarantine(SUBJECT, "evidence").owned_by({"toy.silu": "toy"})
    assert quarantined.quarantined == {SUBJECT: "evidence"}
    other = SUBJECT._replace(dtype="float64")
    assert quarantined.with_quarantines({other: "more"}).quarantined == {other: "more"}


@pytest.mark.parametrize(
    "changed",
    [
        lambda owned: owned.with_quarantine(SUBJECT, "evidence"),
        lambda owned: owned.with_quarantines({SUBJECT: "evidence"}),
        lambda owned: owned.with_quarantine(SUBJECT, "evidence").without_quarantine(["toy.silu"]),
    ],
    ids=["one more", "these", "without"],
)
def test_a_quarantine_does_not_make_probes_be_believed_about_others(
    changed: Callable[[Certification], Certification],
) -> None:
    """Each change makes a new certification; who owns what stays."""
    owners = {"toy.silu": "toy", "other.silu": "other"}
    liar = record(kernels={"toy.silu": {}, "other.silu": {}})
    heard = changed(Certification({}, owners=owners)).with_record(liar)
    assert (heard.is_known("toy.silu"), heard.is_known("other.silu")) == (True, False)


def test_class_of_a_call_is_of_its_outputs_too() -> None:
    """A kernel that was right on dense outputs may be wrong on others."""
    spec = TensorSpec.contiguous("float32", (2, 3))
    strided = TensorSpec("float32", (2, 3), (1, 2))
    assert Subject.of("toy.silu", CallSpec("silu", (spec,), (spec,), {}, "")).shape_class == SMALL
    assert Subject.of("toy.silu", CallSpec("silu", (spec,), (strided,), {}, "")).shape_class == "plain/small/strided"


# --- shadow checks


def compared(error: float, subject: Subject = SUBJECT) -> Comparison:
    return Comparison(subject, "torch.silu", error)


def test_both_kernels_may_be_off_by_the_tolerance() -> None:
    """Neither of the two is exact."""
    assert [compared(error).is_beyond for error in (0.0, 1e-5, 2e-5, 2.1e-5)] == [False, False, False, True]


def test_kernel_that_differs_again_and_again_is_quarantined() -> None:
    """With evidence that names reference, error and limit."""
    ledger = ShadowLedger()
    verdicts = [ledger.note(compared(error)) for error in [0.0] * 5 + [3e-5, 4e-5] + [0.0] * 3 + [3e-5]]
    assert verdicts[:-1] == [None] * 10
    assert verdicts[-1] == ("3 of the last 11 shadow checks differ from torch.silu: error up to 4e-05, allowed 2e-05")


def test_rare_small_differences_are_forgiven() -> None:
    """Only the last checks count: a kernel that is called for weeks will differ a little some day."""
    ledger = ShadowLedger()
    rare = ([3e-5] + [0.0] * (WINDOW // (LIMIT - 1) - 1)) * 20
    assert [ledger.note(compared(error)) for error in rare] == [None] * len(rare)


@pytest.mark.parametrize("error", [0.1, math.inf, math.nan])
def test_gross_difference_is_enough_once(error: float) -> None:
    """Noise does not do that."""
    assert "1 of the last 2 shadow checks" in str([*map(ShadowLedger().note, [compared(0.0), compared(error)])][-1])


def test_integers_that_differ_are_gross() -> None:
    """They have no tolerance at all."""
    assert ShadowLedger().note(compared(math.inf, Subject("toy.matmul", "int64", "matrix/small/dense"))) is not None


def test_checks_of_one_class_say_nothing_about_another() -> None:
    """A kernel that is wrong for long rows keeps the short ones."""
    ledger, other = ShadowLedger(), SUBJECT._replace(shape_class=LONG)
    verdicts = [ledger.note(compared(3e-5, subject)) for subject in (SUBJECT, other) * (LIMIT - 1)]
    assert verdicts == [None] * len(verdicts)


def test_repair_forgets_what_was_seen() -> None:
    """Differences of the broken library are not held against the repaired one."""
    ledger = ShadowLedger()
    for _ in range(LIMIT - 1):
        assert ledger.note(compared(3e-5)) is None
    ledger.forget(["toy.silu"])
    assert ledger.note(compared(3e-5)) is None


def test_memory_is_bounded() -> None:
    """Clients choose shapes; the oldest subjects are forgotten."""
    ledger = ShadowLedger()
    for _ in range(LIMIT - 1):
        ledger.note(compared(3e-5))
    for i in range(MAX_SUBJECTS):
        ledger.note(compared(0.0, SUBJECT._replace(shape_class=str(i))))
    assert ledger.note(compared(3e-5)) is None
