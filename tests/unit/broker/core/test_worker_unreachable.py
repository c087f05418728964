"""Workers that nobody can reach: what their end is to the core, when it comes."""

from __future__ import annotations

from tests.simulation import DEVICES, GPU, GPU_CAPABILITIES
from tests.unit.broker.driver import CLIENT, Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import wire


def lose(d: Driver, backend: str) -> int:
    """It stands still and is killed, and nobody confirms its end. Returns its generation."""
    generation = d.state.workers[backend].generation
    d(ev.WorkerMisbehaved(backend, generation, "its agent does not answer", is_silent=True))
    d(ev.WorkerLost(backend, generation))
    return generation


def test_a_lost_worker_with_calls_on_a_gpu_is_waited_for_and_its_exit_counts() -> None:
    """Streams wait for these calls: were its end no exit to the core, they would wait for ever."""
    d = Driver("alpha", changed={"alpha": GPU_CAPABILITIES["alpha"]}, gpus=(DEVICES[GPU],))
    d(ev.GpuOffered(CLIENT, GPU))
    d(ev.ArenaOffered(CLIENT, 2, 128, GPU))
    d.route(2, device=GPU)
    d.serve(1, 2, point=TimelinePoint(0, 1), body=wire.pack_refs([wire.Ref(2, 0, 0, 64), wire.Ref(2, 0, 64, 64)]))
    generation = lose(d, "alpha")
    assert d.state.workers["alpha"].state.value == "killing"
    assert not d.state.unreachable.has_let_go("alpha", generation)
    d.dies("alpha", exit_code=-9)
    assert d.state.workers["alpha"].state.value != "killing"
    assert not d.state.workers["alpha"].running


def test_the_core_goes_on_without_a_lost_worker_of_the_cpu_and_releases_memory_at_its_end() -> None:
    """Its calls have ended; what was lent to it is all that is left."""
    d = Driver("alpha", "beta")
    d.serve(1)
    generation = lose(d, "alpha")
    assert d.state.unreachable.has_let_go("alpha", generation)
    assert d(ev.WorkerGone("alpha", generation)) == [act.ReleaseCall(CLIENT, 1)]
    assert not d.state.unreachable.has_let_go("alpha", generation)
