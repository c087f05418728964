"""Calls of functions that clients want to launch: what is believed of what they tell, and of whom they are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.simulation import GPU
from tests.unit.broker.driver import CLIENT
from tests.unit.broker.lifting.test_lifts import CODE, LIFTED, TRIALS, Rig

from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.lifting import functions as functions_module
from layerzero.broker.lifting import lifts as lifts_module
from layerzero.broker.lifting.functions import LiftedFunctions, keep, spared, traits
from layerzero.broker.lifting.functions import told as text_of
from layerzero.broker.lifting.known import Known, what_of
from layerzero.broker.lifting.store import Entry, LiftStore
from layerzero.broker.selection.signature import CallSpec
from layerzero.ipc.errors import DeadlineExceeded, InvalidArgument
from layerzero.ipc.functions import frames
from layerzero.ipc.lifting.form import digest
from layerzero.ipc.lifting.keys import call_key
from layerzero.ipc.lifting.specimen import Specimen
from layerzero.ipc.transport.messages import Lifted
from layerzero.ipc.transport.plain import pack_tree
from layerzero.ipc.vocabulary.ops import FUNCTION, FUNCTION_INPUTS, FUNCTION_ON_GPU, GPU_ARRAYS
from layerzero.ipc.vocabulary.tensors import TensorSpec

BYTES = TensorSpec.contiguous("uint8", (1,))
SPEC = TensorSpec.contiguous("float32", (4, 2))
ROUTE = CallSpec(FUNCTION, (BYTES,) * len(FUNCTION_INPUTS), (BYTES,), {"of": ""}, "env", device="GPU-1")
TOLD: dict[str, Any] = {
    "inputs": [SPEC.to_wire(), *[None] * (len(GPU_ARRAYS) - 1)],
    "outputs": [SPEC.to_wire()],
    "call": "00ff",
    "ranges": "",
}
INDEXED = [SPEC.to_wire(), TensorSpec.contiguous("int8", (4,)).to_wire(), *[None] * (len(GPU_ARRAYS) - 2)]
WORKER: Any = SimpleNamespace(backend="env", generation=3)


FUNCTIONS = LiftedFunctions()


def told(**changes: Any) -> CallSpec:
    return FUNCTIONS.told_call(ROUTE, {"call": {**TOLD, **changes}}, WORKER)


def known(spec: CallSpec, generation: int = 3, **more: Any) -> Any:
    its = {
        "granted": {"GPU-1": ROUTE},
        "granted_here": {},
        "is_answered": False,
        "asked_s": 7.0,
        "begun_s": math.inf,
        "backend": "env",
        **more,
    }
    return SimpleNamespace(spec=spec, generation=generation, **its)


def test_a_call_is_of_its_arrays_and_of_the_process_that_computes_it() -> None:
    spec = told()
    assert (spec.op, spec.device, spec.pinned) == (FUNCTION_ON_GPU, "GPU-1", "env")
    assert (spec.inputs[0], spec.outputs, spec.attrs["result"]) == (SPEC, (SPEC,), "float32 4 2")
    assert spec.attrs["worker"].endswith(".3")
    later = FUNCTIONS.told_call(ROUTE, {"call": TOLD}, SimpleNamespace(backend="env", generation=4))  # type: ignore[arg-type]
    anothers = LiftedFunctions().told_call(ROUTE, {"call": TOLD}, WORKER)
    assert len({str(one.attrs) for one in (spec, later, anothers, told())}) == 3
    assert FUNCTIONS.told_call(ROUTE, {}, WORKER) is ROUTE
    assert traits(spec, None) == (True, True)  # type: ignore[arg-type]


def test_a_call_is_another_once_modules_have_changed_in_its_process(tmp_path: Path) -> None:
    functions = LiftedFunctions()

    def name(backend: str) -> str:
        worker: Any = SimpleNamespace(backend=backend, generation=3)
        return str(functions.told_call(ROUTE, {"call": TOLD}, worker).attrs["worker"])

    before = name("env"), name("other")
    assert functions.have_changed("env", Lifted(number=0, reason="MODULES_CHANGED"))
    assert not functions.have_changed("env", Lifted(number=1, reason="NO_CUPTI"))
    assert (name("env") != before[0], name("other")) == (True, before[1])
    rig = Rig(tmp_path / "lifted")
    rig.say(0, reason="MODULES_CHANGED")
    assert (rig.bumps, rig.lifts._functions._changes) == (1, {"alpha": 1})


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": TOLD["inputs"][:1]},
        {"inputs": [None] * len(GPU_ARRAYS)},
        {"inputs": 5},
        {"outputs": []},
        {"outputs": [["float99", [4], [1]]]},
        {"outputs": [["float32", [4, 4], [0, 1]]]},
        {"call": "0g"},
        {"call": b"00"},
        {"call": "00" * 3000},
        {"ranges": "{"},
        {"ranges": "[5]"},
        {"ranges": '[["a0", 3, 3]]'},
        {"ranges": "[" * 4000},
        {"ranges": '[["a0", 0, 3]]'},
        {"ranges": '[["a1", 0, 3]]'},
        {"ranges": '[["x", 0, 3]]'},
        {"inputs": INDEXED, "ranges": '[["a1", 0, %s]]' % ("9" * 4000)},
        {"inputs": INDEXED, "ranges": '[["a1", -129, 3]]'},
    ],
)
def test_what_is_no_call_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        told(**changes)


def test_ranges_are_of_arrays_of_integers() -> None:
    assert told(inputs=INDEXED, ranges='[["a1", -128, 128]]').attrs["ranges"] == '[["a1", -128, 128]]'


def test_a_call_beside_a_kernels_route_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "lifted")
    with pytest.raises(InvalidArgument, match="a call beside a route of silu; allowed: of function"):
        rig.ask(call=TOLD, alignments=[16, *[0] * (len(GPU_ARRAYS) - 1), 16])
    with pytest.raises(InvalidArgument, match="alignments"):
        rig.ask(call=TOLD)
    with pytest.raises(InvalidArgument):
        rig.ask(call=5, alignments=[16, *[0] * (len(GPU_ARRAYS) - 1), 16])


NEXT: Any = SimpleNamespace(backend="env", generation=4, state=WorkerState.READY, deaths_s=[8.0], cause=None)


def test_what_its_worker_has_ended_with_is_not_tried_in_the_next_one() -> None:
    """Whether that was looked at already, or is found as the call is asked for again."""
    its, functions = told(), LiftedFunctions()
    nexts = replace(its, attrs={**its.attrs, "worker": "other"})
    assert functions.refusal(nexts, NEXT, [known(its, is_answered=True)]) is None  # its proof goes on
    assert functions.refusal(its, WORKER, [known(its)]) is None
    assert functions.refusal(nexts, NEXT, [known(its, backend="env2")]) is None
    found = functions.refusal(nexts, NEXT, [known(its)])
    assert found is not None
    assert found["reason"] == "WORKER_FAILED"
    assert functions.refusal(nexts, NEXT, []) == found
    assert functions.refusal(replace(its, attrs={**its.attrs, "call": "11"}), NEXT, []) is None
    assert functions.refusal(ROUTE, NEXT, []) is None


LATE = {"deaths_s": [], "cause": DeadlineExceeded("a call ran longer than 1 s")}


@pytest.mark.parametrize(
    ("changes", "more", "reason"),
    [
        ({}, {}, "WORKER_FAILED"),
        ({"deaths_s": [], "state": WorkerState.DISABLED}, {}, "WORKER_FAILED"),
        ({"deaths_s": []}, {}, ""),  # somebody has restarted it
        ({"deaths_s": [6.0]}, {}, ""),  # that was before
        ({}, {"is_answered": True}, ""),
        ({}, {"asked_s": 7.5}, ""),  # it was at another one
        (LATE, {"begun_s": 7.1}, "TOO_SLOW"),  # a call that waited was due
        (LATE, {}, ""),  # it was not tried yet
        (LATE, {"begun_s": 7.1, "is_answered": True}, ""),
    ],
)
def test_what_it_has_not_ended_with_may_be_tried_again(changes: Any, more: Any, reason: str) -> None:
    functions, spec = LiftedFunctions(), told()
    one, other = known(spec, **more), known(told(call="11"), asked_s=7.25)
    worker: Any = SimpleNamespace(**{**vars(NEXT), **changes})
    functions.note_ended(one, [other, one], worker)
    assert (functions.refusal(spec, worker, []) or {"reason": ""})["reason"] == reason


def test_a_trial_that_takes_too_long_ends_its_worker() -> None:
    """From when it begins, which may be long after it was asked for; and once, for all later processes."""
    its, functions = told(), LiftedFunctions()
    first, second = known(its), known(told(call="11"), asked_s=8.0)
    begins = Lifted(number=0, reason="TRIAL_BEGUN")
    assert functions.has_begun("env", 2, begins, [first]), "of a process that has ended"
    assert not functions.has_begun("env", 3, Lifted(number=0, reason="MODULES_CHANGED"), [first])
    assert not functions.has_begun("env", 3, Lifted(number=1, reason="TRIAL_BEGUN"), [first])
    assert [functions.late(one, 1e9) for one in (first, second)] == [None] * 2
    assert functions.has_begun("env", 3, begins, [first, second])
    begun_s = first.begun_s
    assert functions.has_begun("env", 3, begins, [first, second]), "on its second memory"
    assert (first.begun_s, second.begun_s) == (begun_s, math.inf)
    assert functions.late(first, begun_s + functions_module.TRIAL_S - 0.1) is None
    assert functions.late(replace_known(first, is_answered=True), begun_s + functions_module.TRIAL_S) is None
    event = functions.late(first, begun_s + functions_module.TRIAL_S)
    assert event is not None
    assert (event.backend, event.generation, event.is_late) == ("env", 3, True)
    assert (
        event.detail == "the trial of a function, which has lift=True, ran longer than 30 s, and its worker was killed"
    )
    nexts: Any = SimpleNamespace(**{**vars(NEXT), **LATE})
    functions.note_ended(first, [first, second], nexts)
    found = functions.refusal(its, nexts, [first, second])
    assert found is not None
    assert found["reason"] == "TOO_SLOW"
    assert found["detail"].startswith("a function: its trial had not ended after 30 s, which ended its worker; it is ")
    assert functions.refusal(told(call="11"), nexts, [first, second]) is None


def replace_known(one: Any, **changes: Any) -> Any:
    return SimpleNamespace(**{**vars(one), **changes})


def test_what_is_known_of_a_process_ends_with_it() -> None:
    """Leave, which its client may still have launched with; and why it was refused, which need not hold of the next."""
    refusal = Entry("env.call", "env", {}, reason="NOT_DETERMINISTIC")
    held, kernel = known(told(), key="held", entry=None), known(replace(ROUTE, op="silu"), generation=1, key="kernel")
    stays, waits = (known(told(), granted={}, entry=one, key=str(one)) for one in (refusal, None))
    workers: Any = {"env": SimpleNamespace(backend="env", generation=3)}
    every = {one.key: one for one in (held, kernel, stays, waits)}

    def asks(*ones: Any) -> bool:
        calls = {one.key: one for one in ones}
        is_new = LiftedFunctions().look(calls, workers)
        assert calls == {one.key: one for one in ones if one is not stays or not is_new}
        return is_new

    assert not asks(*every.values())
    workers["env"].generation = 4
    assert [asks(held), asks(stays), asks(waits), asks(kernel), asks(*every.values())] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_what_has_ended_its_worker_is_tried_again_once_somebody_has_restarted_that() -> None:
    """In the next process, and not in the one that is there until then."""
    its, functions = told(), LiftedFunctions()
    nexts = replace(its, attrs={**its.attrs, "worker": "other"})
    workers: Any = {name: SimpleNamespace(**{**vars(NEXT), "backend": name}) for name in ("env", "other")}
    for name, worker in workers.items():
        one = known(its, backend=name)
        functions.note_ended(one, [one], worker)
    functions.forgive(workers["env"])
    assert not functions.look({}, workers)
    assert functions.refusal(nexts, workers["env"], []) is not None
    workers["env"].generation = workers["other"].generation = 5
    assert functions.look({}, workers), "clients are to ask again"
    assert not functions.look({}, workers)
    assert functions.refusal(nexts, workers["env"], []) is None
    assert functions.refusal(nexts, workers["other"], []) is not None


def test_a_refusal_names_the_function_and_what_has_it_tried_again() -> None:
    code = ["m", "f", "m.py", "00", "/", False]
    head = pack_tree([frames.GPU, [frames.CALL, code, [], {}, 0], [], False])
    spec = told(call=(frames.prefix(len(head)) + head).hex())
    again = "; it is tried again once its file has changed, or after lz restart env"
    assert text_of(spec, "env", "two runs differ") == f"m.f: two runs differ{again}"
    assert text_of(spec, "env", "it is busy", is_final=False) == "m.f: it is busy"
    assert text_of(told(), "env", "two runs differ") == f"a function: two runs differ{again}"
    assert text_of(replace(ROUTE, op="silu"), "env", "two runs differ") == "two runs differ"


def test_leave_of_functions_that_are_forgotten_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would see that their worker is another one."""
    monkeypatch.setattr(lifts_module, "MAX_KNOWN", 1)
    for spec, bumps in ((told(), 1), (replace(ROUTE, op="silu"), 0)):
        rig = Rig(tmp_path / spec.op)
        its = Known(77, "key", spec, "env.call", "alpha", {}, (), generation=1)
        its.granted["GPU-1"] = spec
        rig.lifts._known = {"key": its}
        rig.ask()
        assert (its in rig.lifts._known.values(), rig.bumps) == (False, bumps)


def test_forms_that_were_granted_are_kept_as_long_as_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process of a function's worker has forms of its own: a broker that lives for long would keep all of them."""
    monkeypatch.setattr(lifts_module, "MAX_KNOWN", 2)
    rig = Rig(tmp_path / "lifted")
    forms = [replace(LIFTED, attrs={"worker": str(n)}).pack() for n in range(3)]
    for n in (0, 1, 0, 2):
        its = Known(n, str(n), told(), "env.call", "alpha", {}, ())
        its.entry = Entry("env.call", "alpha", {}, form=forms[n])
        assert rig.lifts._answer(rig.state.clients[CLIENT], its, replace(ROUTE, device=GPU))["state"] == "ready"
    assert list(rig.lifts._by_digest.values()) == [forms[0], forms[2]]


def test_a_fault_is_of_a_call_and_outlives_its_worker(tmp_path: Path) -> None:
    """Other functions of the environment, which are the same kernel, have no part in it."""
    rig = Rig(tmp_path / "lifted")

    def one(spec: CallSpec) -> Known:
        what = what_of("env.call", "alpha", "some GPU", None, spec)
        return Known(1, call_key(spec, (), what), spec, "env.call", "alpha", what, ())

    def state(spec: CallSpec) -> Any:
        return rig.lifts._answer(rig.state.clients[CLIENT], one(spec), ROUTE)["state"]

    its, other = told(), told(call="11")
    nexts = replace(its, attrs={**its.attrs, "worker": "other"})
    rig.store.note_suspect(one(its).lasting_key, one(its).what)
    assert [state(spec) for spec in (its, nexts, other)] == ["refused", "refused", "later"]
    rig.store.forgive()
    assert state(nexts) == "later"
    rig.store.note_fault(one(its).what, "lost its GPU")
    assert [state(spec) for spec in (its, nexts, other)] == ["refused", "refused", "later"]


def test_workers_of_functions_are_not_spared() -> None:
    """What they keep, nobody else has."""
    kernel = known(replace(ROUTE, op="silu"), backend="alpha")
    assert spared([known(told()), kernel], set()) == {"alpha"}
    assert spared([known(told()), kernel], {"alpha"}) == set()


def test_of_what_is_known_its_machine_code_alone_is_kept(tmp_path: Path) -> None:
    """Of a function: no later broker asks for it."""
    store = LiftStore(tmp_path / "lifted")
    entry, lifted = Entry("env.call", "env", {}, form=b"form"), Specimen(LIFTED, {digest(CODE): CODE}, TRIALS)
    keep(store, known(told(), entry=entry, key="key"), lifted)
    keep(store, known(told(), entry=replace(entry, form=b"", reason="NO_CUPTI"), key="key"), None)
    assert (list(store.entries()), store.code(digest(CODE))) == ([], CODE)
    keep(store, known(replace(ROUTE, op="silu"), entry=entry, key="key"), lifted)
    assert [name for name, _ in store.entries()] == ["key"]
