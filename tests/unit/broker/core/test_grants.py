"""Which memory and which GPU of a client a worker has: from the first call that needs it until nothing does."""

from __future__ import annotations

import pytest
from tests.simulation import DEVICES, GPU, GPU_CAPABILITIES
from tests.unit.broker.driver import CLIENT, Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.ipc.errors import NoTransport
from layerzero.ipc.shm.timeline_words import TimelinePoint
from layerzero.ipc.transport import wire

OTHER = b"C2"
MEMORY = (act.GrantArena, act.TakeBackArena, act.CloseArena)
LEFT = (act.TellClientLeft,)
GPUS = (act.GrantGpu, act.TakeBackGpu, act.CloseGpu)


def of(actions: list[act.Action], kinds: tuple[type, ...]) -> list[act.Action]:
    return [action for action in actions if isinstance(action, kinds)]


def refs(*arenas: int) -> bytes:
    """An input and an output in these."""
    return wire.pack_refs([wire.Ref(arena, 0, 64 * i, 64) for i, arena in enumerate((arenas[0], arenas[-1]))])


def on_gpu(*backends: str) -> Driver:
    """Client 1 has offered a GPU and arena 2 on it; its route 2 is there."""
    driver = Driver(*backends, changed={name: GPU_CAPABILITIES[name] for name in backends}, gpus=(DEVICES[GPU],))
    add_gpu(driver, CLIENT)
    return driver


def add_gpu(driver: Driver, identity: bytes) -> None:
    driver(ev.GpuOffered(identity, GPU))
    driver(ev.ArenaOffered(identity, 2, 128, GPU))
    driver.route(2, identity=identity, device=GPU)


def gpu_call(driver: Driver, seq: int, *, identity: bytes = CLIENT) -> list[act.Action]:
    return driver.call(seq, 2, identity=identity, point=TimelinePoint(0, seq), body=refs(2))


def end(driver: Driver, actions: list[act.Action]) -> list[act.Action]:
    """The call that these actions run is answered, and done on its GPU; returns what that led to."""
    run = driver.run_of(actions)
    backend = next(name for name, worker in driver.state.workers.items() if worker.identity == run.identity)
    return driver.ran(run) + driver(ev.TimelinesPolled(backend, 1, done=[run.dispatch], ready=set()))


# --- arenas --------------------------------------------------------------------------------------------------


def test_a_worker_gets_each_arena_of_a_call_once() -> None:
    """It maps them; a second descriptor of the same memory would be one too many."""
    driver = Driver("alpha", depth=4)
    driver(ev.ArenaOffered(CLIENT, 7, 128))
    driver.call(1, body=refs(1, 7))
    granted = of(driver.ready("alpha"), MEMORY)
    assert granted == [act.GrantArena("alpha", 1, 1, 1), act.GrantArena("alpha", 1, 1, 7)]
    assert of(driver.call(2, body=refs(7, 1)), MEMORY) == []


def test_a_worker_gets_no_arena_that_its_calls_do_not_name() -> None:
    """What a library cannot reach it cannot spoil."""
    driver = Driver("alpha")
    driver(ev.ArenaOffered(CLIENT, 7, 128))
    driver.call(1, body=refs(7))
    assert of(driver.ready("alpha"), MEMORY) == [act.GrantArena("alpha", 1, 1, 7)]


def test_closing_an_arena_leaves_those_of_others_and_those_of_the_same_number() -> None:
    """Arenas are numbered by each client."""
    driver = Driver("alpha")
    driver.join(OTHER, 2)
    driver(ev.ArenaOffered(CLIENT, 2, 128))
    driver.ran(driver.serve(1, body=refs(1, 2)))
    driver.ran(driver.serve(1, identity=OTHER))
    assert driver(ev.ArenaGivenUp(CLIENT, 1)) == [act.TakeBackArena("alpha", 1, 1, 1), act.CloseArena(1, 1)]
    assert of(driver.call(2, body=refs(2)), MEMORY) == []
    assert of(driver.call(2, identity=OTHER), MEMORY) == []


def test_an_arena_that_takes_a_closed_ones_number_is_lent_anew() -> None:
    """A worker that kept the old mapping would write into memory that is somebody else's by now."""
    driver = Driver("alpha")
    driver.ran(driver.serve(1))
    driver(ev.ArenaGivenUp(CLIENT, 1))
    driver(ev.ArenaOffered(CLIENT, 1, 128))
    assert of(driver.call(2), MEMORY) == [act.GrantArena("alpha", 1, 1, 1)]


def test_an_arena_that_takes_a_closed_ones_number_is_checked_anew() -> None:
    """The same references may lie beyond it."""
    driver = Driver("alpha")
    driver.ran(driver.serve(1))
    driver(ev.ArenaGivenUp(CLIENT, 1))
    driver(ev.ArenaOffered(CLIENT, 1, 64))
    assert isinstance(driver.call(2)[0], act.DropClient)


def test_an_arena_that_takes_a_retired_ones_number_is_not_closed_with_the_next_call() -> None:
    """That one was given up; this one was not."""
    driver = on_gpu("alpha")
    driver.call(1, 2, point=TimelinePoint(0, 1), body=refs(2))
    actions = driver.ready("alpha")
    driver(ev.ArenaGivenUp(CLIENT, 2))
    assert of(end(driver, actions), MEMORY) == [act.TakeBackArena("alpha", 1, 1, 2), act.CloseArena(1, 2)]
    driver(ev.ArenaOffered(CLIENT, 2, 128, GPU))
    assert of(end(driver, gpu_call(driver, 2)), MEMORY) == []


def test_arenas_that_a_worker_does_not_need_are_taken_back_from_it_alone() -> None:
    """Another client's stay, and so do those that another worker has."""
    driver = Driver("alpha", "beta")
    driver.join(OTHER, 2)
    driver.route(2, backend="beta")
    driver(ev.ArenaOffered(CLIENT, 2, 128))
    driver.ran(driver.serve(1, body=refs(1, 2)))
    driver.ran(driver.serve(2, 2))
    driver.ran(driver.serve(1, identity=OTHER))
    taken = of(driver(ev.RouteForgotten(CLIENT, 1)), MEMORY)
    assert taken == [act.TakeBackArena("alpha", 1, 1, 1), act.TakeBackArena("alpha", 1, 1, 2)]
    assert of(driver(ev.ArenaGivenUp(CLIENT, 1)), MEMORY) == [
        act.TakeBackArena("beta", 1, 1, 1),
        act.CloseArena(1, 1),
    ]
    assert of(driver.call(2, identity=OTHER), MEMORY) == []


def test_a_worker_that_keeps_something_for_clients_is_told_of_their_ends() -> None:
    """After the last call, once, and of those alone that it has served in this start."""
    driver = Driver("alpha")
    driver.state.closing.grants.keeping = frozenset({"silu"})
    driver.join(OTHER, 2)
    run = driver.serve(1)
    assert of(driver(ev.ClientLeft(CLIENT)), LEFT) == []
    assert of(driver.ran(run), LEFT) == [act.TellClientLeft("alpha", 1, 1)]
    assert of(driver(ev.ClientLeft(OTHER)), LEFT) == []


def test_a_worker_is_told_of_a_client_whose_memory_it_has_lost_before() -> None:
    """What it keeps does not lie there."""
    driver = Driver("alpha")
    driver.state.closing.grants.keeping = frozenset({"silu"})
    driver.ran(driver.serve(1))
    assert of(driver(ev.RouteForgotten(CLIENT, 1)), MEMORY) == [act.TakeBackArena("alpha", 1, 1, 1)]
    assert of(driver(ev.ClientLeft(CLIENT)), LEFT) == [act.TellClientLeft("alpha", 1, 1)]


# --- GPUs ----------------------------------------------------------------------------------------------------


def test_a_worker_gets_a_clients_gpu_once_with_its_slot() -> None:
    """It opens the timeline page and the offer, and signs the offer at the slot of its start."""
    driver = on_gpu("alpha")
    gpu_call(driver, 1)
    actions = driver.ready("alpha")
    slot = driver.state.workers["alpha"].slot
    assert slot > 0
    assert of(actions, (*GPUS, *MEMORY)) == [act.GrantGpu("alpha", 1, 1, GPU, slot), act.GrantArena("alpha", 1, 1, 2)]
    assert of(gpu_call(driver, 2), GPUS) == []


def test_a_call_on_the_cpu_lends_no_gpu() -> None:
    """It is about arenas alone."""
    driver = Driver("alpha")
    driver.call(1)
    assert of(driver.ready("alpha"), GPUS) == []


def test_a_gpu_that_is_offered_again_is_taken_back_from_who_has_it() -> None:
    """The next call lends what it is offered by now."""
    driver = on_gpu("alpha", "beta")
    gpu_call(driver, 1)
    end(driver, driver.ready("alpha"))
    assert driver(ev.GpuOffered(CLIENT, GPU)) == [act.TakeBackGpu("alpha", 1, 1, GPU)]
    assert driver(ev.GpuOffered(CLIENT, GPU)) == []
    slot = driver.state.workers["alpha"].slot
    assert of(gpu_call(driver, 2), GPUS) == [act.GrantGpu("alpha", 1, 1, GPU, slot)]


def test_a_gpu_that_one_client_offers_again_stays_lent_of_another() -> None:
    """Each has its own timeline page of the same GPU."""
    driver = on_gpu("alpha")
    driver.join(OTHER, 2)
    add_gpu(driver, OTHER)
    gpu_call(driver, 1)
    end(driver, driver.ready("alpha"))
    end(driver, gpu_call(driver, 1, identity=OTHER))
    assert driver(ev.GpuOffered(OTHER, GPU)) == [act.TakeBackGpu("alpha", 1, 2, GPU)]
    assert of(gpu_call(driver, 2), GPUS) == []


def test_a_client_that_leaves_takes_its_gpu_along() -> None:
    """The worker lets go first; then the broker closes the page and the offer."""
    driver = on_gpu("alpha")
    gpu_call(driver, 1)
    end(driver, driver.ready("alpha"))
    client = driver.state.clients[CLIENT]
    assert of(driver(ev.ClientLeft(CLIENT)), GPUS) == [act.TakeBackGpu("alpha", 1, 1, GPU), act.CloseGpu(1, GPU)]
    assert client.gpus == set()


@pytest.mark.parametrize("offers_again", [False, True])
def test_who_offers_its_memory_in_another_way_is_served_by_whom_the_first_did_not_reach(offers_again: bool) -> None:
    """Until then calls pass that worker by, so that none of them waits for an attempt that must fail."""
    driver = on_gpu("alpha", "beta")
    gpu_call(driver, 1)
    driver.raised(driver.run_of(driver.ready("alpha")), NoTransport("its memory is not reached"))
    end(driver, driver.ready("beta"))
    if offers_again:
        driver(ev.GpuOffered(CLIENT, GPU))
    run = driver.run_of(gpu_call(driver, 2))
    assert run.identity == driver.state.workers["alpha" if offers_again else "beta"].identity
