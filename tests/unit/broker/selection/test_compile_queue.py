"""broker/selection/compile_queue.py, in the core and alone: who may serve a call before and after a kernel is
compiled for it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.simulation import CAPABILITIES, route_body
from tests.unit.broker.driver import CLIENT, Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.selection.compile_queue import MAX_QUEUED, Compilation, Job
from layerzero.broker.selection.policy import Policy, Weights
from layerzero.broker.selection.signature import CallSpec
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.compile_unit import Unit
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.transport.messages import Prepare, decode

CLASSES = {"plain/small/dense": 0.0}
ALPHA = Unit("alpha.silu", "dtypes=float32,float32")


def job(number: int, backend: str = "alpha") -> Job:
    return Job(backend, Unit(f"{backend}.silu", f"row={number}"), b"")


def probed(backend: str) -> ProbeRecord:
    kernel_id = f"{backend}.silu"
    certified = {kernel_id: dict.fromkeys(("float32", "float64"), CLASSES)}
    return ProbeRecord(backend, "key", ok=True, seconds=0.1, kernels={kernel_id: {}}, certified=certified)


class Jit(Driver):
    """alpha, the best, compiles for each dtype; beta is the next. Both were probed."""

    def __init__(self, *backends: str, compiled: tuple[Unit, ...] = (), **limits: Any) -> None:
        alpha = CAPABILITIES["alpha"]
        (kernel,) = alpha.ops["silu"]
        jit = kernel.model_copy(update={"needs_jit": True, "compiled_for": ("dtypes",)})
        changed = {"alpha": alpha.model_copy(update={"ops": {"silu": (jit,)}})}
        super().__init__(*(backends or ("alpha", "beta")), changed=changed, **limits)
        self.state.engine.set_compilation(Compilation({"alpha": compiled}))
        for backend in self.state.capabilities:
            self.state.engine.set_certification(self.state.engine.certification.with_record(probed(backend)))

    def compiles(self, actions: list[act.Action]) -> list[Unit]:
        return [action.unit for action in actions if isinstance(action, act.Compile)]

    def compiled(self, unit: Unit = ALPHA, failure: str = "") -> list[act.Action]:
        return self(ev.CompileEnded("alpha", unit, failure, 1.0))

    def explained(self) -> dict[str, list[str]]:
        """Reasons of each kernel."""
        _, ranked, _ = self.state.explain(route_body(), self.now_s)
        return {v.kernel_id: [reason.code.value for reason in v.reasons] for v in ranked}


# --- the queue


def test_a_backend_compiles_one_thing_at_a_time_in_the_order_of_asking() -> None:
    """Compilers take all the cores they get."""
    compilation = Compilation()
    assert compilation.ask(job(1)) == job(1)
    assert [compilation.ask(job(n)) for n in (1, 2, 3, 2)] == [None] * 4
    assert compilation.ask(job(1, "beta")) == job(1, "beta")
    assert compilation.end("alpha", job(1).unit, "") == job(2)
    assert compilation.end("alpha", job(2).unit, "") == job(3)
    assert compilation.end("alpha", job(3).unit, "") is None
    assert compilation.ask(job(3)) is None
    assert compilation.ask(job(4)) == job(4)


def test_what_a_call_waits_for_comes_first() -> None:
    """Others have somebody to go to. Of those that wait none is overtaken: each has a deadline."""
    compilation = Compilation()
    for number in (1, 2, 3):
        compilation.ask(job(number))
    compilation.ask(job(3), is_urgent=True)
    compilation.ask(job(4), is_urgent=True)
    order = [compilation.end("alpha", job(number).unit, "") for number in (1, 3, 4, 2)]
    assert order == [job(3), job(4), job(2), None]


@pytest.mark.parametrize("is_urgent", [False, True])
def test_the_queue_is_bounded(is_urgent: bool) -> None:
    """Shapes that never come back must not be compiled for hours, and a client may ask for any number of them."""
    compilation = Compilation()
    for number in range(4 * MAX_QUEUED):
        compilation.ask(job(number), is_urgent=is_urgent)
    ended = 0
    while compilation.running():
        compilation.end("alpha", compilation.running()[0], "")
        ended += 1
    assert ended == 1 + MAX_QUEUED * (2 if is_urgent else 1)
    assert not compilation.is_under_way(job(4 * MAX_QUEUED - 1))


def test_a_call_waits_for_nothing_that_is_not_queued() -> None:
    """It would wait for its whole timeout; so it is refused, and may come again."""
    jit = Jit("alpha")
    for number in range(1 + 2 * MAX_QUEUED):
        jit.state.engine.compilation.ask(job(number), is_urgent=True)
    (refused,) = [action for action in jit.call(1) if isinstance(action, act.Refuse)]
    assert refused.error.code == "NO_BACKEND"
    assert "NOT_COMPILED" in refused.error.message


def test_a_failure_is_kept_until_the_backend_is_repaired() -> None:
    """The same compiler would say the same again."""
    compilation = Compilation()
    compilation.ask(job(1))
    compilation.end("alpha", job(1).unit, "nvcc: error")
    rejection = compilation.rejection(job(1).unit)
    assert rejection is not None
    assert (rejection.code, rejection.detail) == (Reason.COMPILE_FAILED, "row=1: nvcc: error")
    assert compilation.ask(job(1)) is None
    compilation.forgive(["beta.silu"])
    assert compilation.ask(job(1)) is None
    compilation.forgive(["alpha.silu"])
    assert compilation.ask(job(1)) == job(1)


# --- the core


def test_the_first_call_starts_a_compilation_and_goes_elsewhere() -> None:
    """A call must not take a minute where another kernel takes a millisecond."""
    driver = Jit()
    actions = driver.call(1)
    (started,) = [action for action in actions if isinstance(action, act.Compile)]
    assert (started.backend, started.unit) == ("alpha", ALPHA)
    message = decode(started.body, Prepare)
    assert (message.kernel_id, message.op) == ("alpha.silu", "silu")
    assert act.Probe("beta") in actions
    run = driver.run_of(driver.ready("beta"))
    driver.ran(run)
    assert driver.explained() == {"beta.silu": [], "alpha.silu": ["NOT_COMPILED"]}
    assert driver.compiles(driver.call(2)) == []


def test_calls_go_to_the_kernel_once_it_is_compiled() -> None:
    """That is what it was compiled for."""
    driver = Jit()
    driver.call(1)
    driver.ran(driver.run_of(driver.ready("beta")))
    driver.compiled()
    assert [note.event for note in driver.notes if note.event.startswith("kernel.")] == ["kernel.compiled"]
    assert driver.explained() == {"alpha.silu": [], "beta.silu": []}
    assert act.Probe("alpha") in driver.call(2)


def test_what_an_earlier_broker_compiled_need_not_be_compiled() -> None:
    """Caches outlive it."""
    driver = Jit(compiled=(ALPHA,))
    actions = driver.call(1)
    assert driver.compiles(actions) == []
    assert act.Probe("alpha") in actions


def test_each_unit_is_compiled_for_itself() -> None:
    """Another dtype is another kernel to the compiler."""
    driver = Jit(compiled=(ALPHA,))
    driver.route(2, dtype="float64")
    assert [unit.calls for unit in driver.compiles(driver.call(1, 2))] == ["dtypes=float64,float64"]


def test_a_kernel_that_would_not_win_is_not_compiled() -> None:
    """Nobody would call it."""
    driver = Jit()
    driver.state.engine.set_policy(Policy(weights=Weights(priority=-1.0)))
    assert driver.compiles(driver.call(1)) == []


def test_a_kernel_that_no_probe_has_seen_is_probed_first() -> None:
    """It may be wrong, or not there at all."""
    driver = Jit()
    driver.state.engine.set_certification(driver.state.engine.certification.__class__({"beta": probed("beta")}))
    actions = driver.call(1)
    assert [a.backend for a in actions if isinstance(a, act.Probe)] == ["alpha", "beta"]
    assert driver.compiles(actions) == []
    driver(ev.ProbeEnded("alpha", None, probed("alpha")))
    assert driver.compiles(driver.call(2)) == [ALPHA]


def test_a_pinned_call_is_held_and_served_when_the_compilation_has_ended() -> None:
    """Nobody else may take it; its report says what it waited for."""
    driver = Jit()
    driver.route(2, backend="alpha")
    assert driver.compiles(driver.call(1, 2)) == [ALPHA]
    driver.now_s += 3.0
    assert act.Probe("alpha") in driver.compiled()
    (answer,) = [a for a in driver.ran(driver.run_of(driver.ready("alpha"))) if isinstance(a, act.Answer)]
    assert [(a["code"], a["kernel_id"]) for a in answer.attempts] == [("NOT_COMPILED", "alpha.silu")]
    assert "waited 3.0 s" in answer.attempts[0]["detail"]


def test_a_held_call_ends_at_its_deadline_and_the_compilation_goes_on() -> None:
    """The next call may have more luck."""
    driver = Jit()
    driver.route(2, backend="alpha")
    driver.call(1, 2, timeout_s=2.0)
    assert driver.state.wakeup_s == driver.now_s + 2.0
    assert driver.tick(1.9) == []
    (refusal,) = driver.tick(0.2)
    assert isinstance(refusal, act.Refuse)
    assert refusal.error.code == "DEADLINE"
    assert "is being compiled" in refusal.error.message
    assert driver.state.engine.compilation.running() == [ALPHA]


def test_a_failed_compilation_sends_the_held_call_on_with_the_compilers_words() -> None:
    """Pinned, it ends; otherwise the next kernel has it."""
    driver = Jit()
    driver.route(2, backend="alpha")
    driver.call(1, 2)
    (refusal,) = [a for a in driver.compiled(failure="nvcc: no such architecture") if isinstance(a, act.Refuse)]
    assert refusal.error.code == "NO_BACKEND"
    assert "COMPILE_FAILED: dtypes=float32,float32: nvcc: no such architecture" in refusal.error.message
    assert act.Probe("beta") in driver.call(2)
    driver(ev.BackendReset("alpha", None))
    assert driver.compiles(driver.call(3)) == [ALPHA]


def test_a_client_that_leaves_takes_its_held_calls_along() -> None:
    """Else its memory would be kept for nothing."""
    driver = Jit()
    driver.route(2, backend="alpha")
    driver.call(1, 2)
    assert act.CloseArena(1, 1) in driver(ev.ClientLeft(CLIENT))
    assert driver.compiled() == []


def test_a_shutdown_ends_held_calls() -> None:
    """They hear of it at once."""
    driver = Jit()
    driver.route(2, backend="alpha")
    driver.call(1, 2)
    (refusal,) = [a for a in driver(ev.ShutdownAsked()) if isinstance(a, act.Refuse)]
    assert refusal.error.code == "BROKER_LOST"


def test_somebody_may_have_kernels_compiled_before_the_first_call() -> None:
    """Warm-up: of the backends that are named, and only where they would serve such calls."""
    driver = Jit()
    spec = CallSpec.parse(route_body())
    assert driver.compiles(driver(ev.CompileAsked(spec, ["beta"]))) == []
    assert driver.compiles(driver(ev.CompileAsked(spec, ["alpha", "beta"]))) == [ALPHA]
    assert [v.kernel_id for v in driver.state.compiling.missing(spec, driver.now_s)] == ["alpha.silu"]
    driver.compiled()
    assert driver.state.compiling.missing(spec, driver.now_s) == []


def test_policy_that_keeps_the_kernel_out_keeps_its_compiler_out() -> None:
    """Nothing is compiled that may not serve."""
    driver = Jit()
    driver.state.engine.set_policy(Policy(allow_jit_compile=False))
    assert driver.compiles(driver.call(1)) == []
