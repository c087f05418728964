"""Express lanes as the core decides on them: one rule per test."""

from __future__ import annotations

import math

import pytest
from tests.simulation import route_body
from tests.unit.broker.driver import CLIENT, LIMITS, Driver

from layerzero.broker.core import actions as act
from layerzero.broker.core import events as ev
from layerzero.broker.core.lease_policy import WATCH_S
from layerzero.broker.core.leases import MAX_LOST, SETTLED_CALLS
from layerzero.broker.core.model import FORCED_WINDOW_S, MAX_FORCED, RunGrant
from layerzero.broker.core.worker_fsm import WorkerState
from layerzero.broker.selection.policy import Policy, Weights
from layerzero.ipc.errors import BackendError
from layerzero.ipc.transport.messages import Decision, Lease, Neighbours, decode, encode
from layerzero.ipc.vocabulary.worker_codes import RENEWAL_EXIT, STALLED_EXIT, mark

OTHER = b"C2"
NEAR = [[[3, 4]], [[0], [0]]]  # three numbers are ranked as four are


def of(actions: list[act.Action], *kinds: type) -> list[act.Action]:
    return [action for action in actions if isinstance(action, kinds)]


def names(actions: list[act.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def refusal(actions: list[act.Action]) -> act.Refuse:
    (refuse,) = (action for action in actions if isinstance(action, act.Refuse))
    return refuse


def served(driver: Driver, calls: int, *, first: int = 1, route: int = 1, **more: bytes) -> list[act.Action]:
    """So many calls, one by one, with their answers; what the last answer came with."""
    actions: list[act.Action] = []
    for seq in range(first, first + calls):
        actions = driver.ran(driver.serve(seq, route, **more))
    return actions


def settled(*backends: str, is_open: bool = True, **limits: object) -> Driver:
    """A driver whose route 1 has a lease of lane 1 to the first backend."""
    driver = Driver(*(backends or ("alpha", "beta", "gamma")), express=True, **limits)
    served(driver, SETTLED_CALLS)
    assert len(driver.state.leases.lanes) == 1
    if is_open:
        driver(ev.LaneOpened(CLIENT, 1))
    return driver


def poison(driver: Driver) -> list[act.Action]:
    """Inputs of route 1 are in quarantine, as if two workers had died of them."""
    driver.state.clients[CLIENT].poisons[1] += 1
    return driver(ev.CallPoisoned(CLIENT, 1, b"b" * 16))


# --- how a lease comes ---------------------------------------------------------------------------------------


def test_route_that_one_worker_served_three_times_gets_a_lease() -> None:
    """The worker is told first; its next answer shows that it knows. The client has its answer last, decision known."""
    driver = Driver(express=True)
    assert not of(served(driver, SETTLED_CALLS - 2), act.SendAllow)
    told = of(served(driver, 1, first=SETTLED_CALLS - 1), act.SendAllow, act.SendLease)
    near = encode(Neighbours(neighbours=NEAR))
    assert told == [act.SendAllow(driver.state.workers["alpha"].identity, 1, 1, near)]
    lease, answer = served(driver, 1, first=SETTLED_CALLS)
    assert isinstance(answer, act.Answer)
    assert isinstance(lease, act.SendLease)
    assert (lease.identity, lease.route, lease.decision) == (CLIENT, 1, answer.decision)
    assert decode(lease.body, Lease) == Lease(lane=1, plan=1, epoch=0, neighbours=NEAR)


def test_calls_that_were_sent_before_the_worker_was_told_bring_no_lease() -> None:
    """They may be answered before it reads that; the client's first call on the lane would come too early."""
    driver = Driver("alpha", express=True, depth=4)
    runs = [driver.serve(1), *(driver.run_of(driver.call(seq)) for seq in range(2, 5))]
    steps = [names(of(driver.ran(run), act.SendAllow, act.SendLease)) for run in runs]
    assert steps == [[], ["SendAllow"], [], []]
    assert names(served(driver, 1, first=5)) == ["SendLease", "Answer"]


def test_neighbours_settle_together() -> None:
    """Each comes once, as a decoder's lengths do; a lease of one covers the others. It is not of the first, whose
    client was told what held before the worker was ready."""
    driver = Driver("alpha", express=True)
    for number, extent in ((2, 5), (3, 6), (4, 7)):
        driver.route(number, extent=extent)
    told = [names(of(served(driver, 1, first=n, route=n), act.SendAllow, act.SendLease)) for n in (2, 3)]
    assert told == [[], ["SendAllow"]]
    (lease,) = of(served(driver, 1, first=4, route=4), act.SendLease)
    assert isinstance(lease, act.SendLease)
    assert lease.route == 3
    assert decode(lease.body, Lease).neighbours == [[[5, 8]], [[0], [0]]]


def test_calls_of_another_bucket_do_not_settle_it() -> None:
    driver = Driver("alpha", express=True)
    for number, extent in ((2, 3), (3, 5), (4, 9)):
        driver.route(number, extent=extent)
        assert not of(served(driver, 1, first=number, route=number), act.SendAllow)


def test_neighbours_are_looked_at_while_some_inputs_are_poison() -> None:
    """They could be the same numbers, in another length."""
    driver = Driver("alpha", "beta", express=True)
    driver.route(2, dtype="float64")
    served(driver, 1)
    poison(driver)
    (lease,) = of(served(driver, SETTLED_CALLS, first=2, route=2), act.SendLease)
    assert isinstance(lease, act.SendLease)
    assert decode(lease.body, Lease).neighbours == []


def test_route_has_one_lease_at_a_time() -> None:
    """A second one would say the same."""
    assert names(served(settled(), 1, first=9)) == ["Answer"]


def test_calls_that_another_worker_served_do_not_count() -> None:
    """Three in a row by one worker show that it is settled; a fallback shows the contrary."""
    driver = Driver("alpha", "beta", express=True)
    served(driver, SETTLED_CALLS - 1)
    driver.raised(driver.serve(8), BackendError("kernel raised"))
    assert not of(driver.ran(driver.run_of(driver.ready("beta"))), act.SendLease)
    assert not of(served(driver, 1, first=9), act.SendLease)


def test_second_route_to_the_same_worker_shares_its_lane() -> None:
    """A lane costs a page, an eventfd and a pair of sockets."""
    driver = settled()
    driver.route(2, dtype="float64")
    (lease,) = of(served(driver, SETTLED_CALLS, route=2), act.SendLease)
    assert isinstance(lease, act.SendLease)
    assert decode(lease.body, Lease).lane == 1


def test_each_client_has_its_own_lane() -> None:
    """A page has one writer on each side."""
    driver = settled()
    driver.join(OTHER, 2)
    (lease,) = of(served(driver, SETTLED_CALLS, identity=OTHER), act.SendLease)
    assert isinstance(lease, act.SendLease)
    assert decode(lease.body, Lease).lane == 2


def test_route_forgotten_under_its_last_call_gets_no_lease() -> None:
    """Nobody could use it, and nobody would end it."""
    driver = Driver("alpha", express=True)
    served(driver, SETTLED_CALLS - 1)
    run = driver.serve(7)
    driver(ev.RouteForgotten(CLIENT, 1))
    assert names(driver.ran(run)) == ["Answer", "SendDrop"]
    assert not any(lane.routes for lane in driver.state.leases.lanes.values())


@pytest.mark.parametrize("why", ["tuned", "checked", "poisoned", "switched off", ""])
def test_none_of_the_answers_to_such_calls_comes_with_a_lease(why: str) -> None:
    """Neither the last nor those before it."""
    driver = Driver(express=why != "switched off")
    policies = {"tuned": Policy(tune_budget=1), "checked": Policy(shadow_rate=0.5)}
    driver(ev.PolicyChanged(policies.get(why, Policy())))
    if why == "poisoned":
        poison(driver)
    served(driver, 2 * SETTLED_CALLS, digest=b"g" * 16)
    assert bool(driver.state.leases.lanes) == (why == "")


# --- opening -------------------------------------------------------------------------------------------------


def test_opened_lane_is_lent_to_its_worker() -> None:
    """It maps the page and listens to the doorbell."""
    driver = settled(is_open=False)
    assert driver(ev.LaneOpened(CLIENT, 1)) == [act.GrantLane("alpha", 1, 1, 1)]


def test_lane_opened_late_learns_the_epoch_first() -> None:
    """A page starts at epoch 0, with which leases that were taken back would hold again."""
    driver = settled(is_open=False)
    driver(ev.PolicyChanged(Policy()))
    assert driver(ev.LaneOpened(CLIENT, 1)) == [act.RevokeLane(1, 1), act.GrantLane("alpha", 1, 1, 1)]


def test_lane_opened_after_its_worker_died_ends_at_once() -> None:
    """Nobody would ever ring back."""
    driver = settled(is_open=False)
    driver.dies("alpha")
    assert driver(ev.LaneOpened(CLIENT, 1)) == [act.EndLane(1)]


def test_lane_of_another_client_cannot_be_opened() -> None:
    """Its calls would run on the impostor's page."""
    driver = settled(is_open=False)
    driver.join(OTHER, 2)
    assert names(driver(ev.LaneOpened(OTHER, 1)))[:2] == ["EndLane", "DropClient"]
    assert driver(ev.LaneOpened(CLIENT, 1)) == [act.GrantLane("alpha", 1, 1, 1)]


# --- how a lease ends ----------------------------------------------------------------------------------------


def test_leases_end_with_the_policy() -> None:
    """The next call may belong elsewhere."""
    driver = settled()
    assert driver(ev.PolicyChanged(Policy())) == [act.RevokeLane(1, 1)]
    assert driver(ev.PolicyChanged(Policy())) == []  # there are none left


def test_lease_comes_again_after_one_call() -> None:
    """The route is still settled; it had to be decided anew."""
    driver = settled()
    driver(ev.PolicyChanged(Policy()))
    (lease,) = of(served(driver, 1, first=8), act.SendLease)
    assert isinstance(lease, act.SendLease)
    assert decode(lease.body, Lease) == Lease(lane=1, plan=1, epoch=1, neighbours=NEAR)


def test_both_leases_of_equal_routes_end() -> None:
    """They share a plan. A client that forgets one of them still has the other."""
    driver = settled()
    driver.route(2)
    served(driver, SETTLED_CALLS, route=2)
    driver(ev.RouteForgotten(CLIENT, 2))
    assert driver(ev.PolicyChanged(Policy())) == [act.RevokeLane(1, 1)]
    assert of(served(driver, 1, first=9), act.SendLease)


def test_poison_takes_leases_back() -> None:
    """From now on its signature needs digests."""
    assert poison(settled()) == [act.RevokeLane(1, 1)]


def test_shutdown_takes_leases_back() -> None:
    """Workers end what they have and no more."""
    assert settled()(ev.ShutdownAsked())[0] == act.RevokeLane(1, 1)


def test_failure_of_the_leased_kernel_takes_the_lease_back() -> None:
    """Its health counts for every call, wherever it runs."""
    driver = settled("alpha", "beta")
    assert of(driver.raised(driver.serve(8), BackendError("kernel raised")), act.RevokeLane)


def test_lease_ends_soon_after_another_kernel_became_better() -> None:
    """Times change the choice without an event of their own; a call on a lane asks nobody."""
    driver = settled("alpha", "beta", is_open=False)
    driver(ev.PolicyChanged(Policy(weights=Weights(perfdb=1000.0))))
    served(driver, 1, first=8)
    driver.state.clients[CLIENT].routes[1].grant = RunGrant("beta.silu", driver.now_s - 1, driver.now_s + 1)
    for _ in range(16):
        driver(ev.RanInClient(CLIENT, 1, "beta.silu", 10))
    assert driver.state.wakeup_s == driver.now_s + WATCH_S
    assert driver.tick(WATCH_S) == [act.RevokeLane(1, 2)]


def test_idle_broker_with_leases_sleeps() -> None:
    """Without new times there is nothing to look at."""
    driver = settled()
    driver.tick(WATCH_S)
    assert driver.state.wakeup_s == math.inf


def test_lane_ends_with_its_client() -> None:
    """The worker must let go of the page."""
    driver = settled()
    assert driver(ev.ClientLeft(CLIENT))[0] == act.TakeBackLane("alpha", 1, 1)
    assert not driver.state.leases


@pytest.mark.parametrize("is_open", [True, False])
def test_lanes_end_with_their_worker(is_open: bool) -> None:
    """Clients that wait for its ring would wait for ever."""
    driver = settled(is_open=is_open)
    driver.join(OTHER, 2)
    served(driver, SETTLED_CALLS, identity=OTHER)
    assert of(driver.dies("alpha"), act.EndLane) == [act.EndLane(1), act.EndLane(2)]
    assert not driver.state.leases


def test_new_start_of_a_worker_gets_a_new_lane() -> None:
    """A page belongs to one process at each end."""
    driver = settled("alpha")
    driver.dies("alpha")
    driver.tick(1.0)
    driver.ready("alpha")
    (lease,) = of(served(driver, SETTLED_CALLS, first=8), act.SendLease)
    assert isinstance(lease, act.SendLease)
    assert decode(lease.body, Lease).lane == 2


def test_ended_lanes_are_not_remembered_without_end() -> None:
    """A client may never say what was on them."""
    driver = settled("alpha", restart_budget=1000)
    for start in range(MAX_LOST + 5):
        driver.dies("alpha")
        driver.tick(40.0)
        driver.ready("alpha")
        served(driver, SETTLED_CALLS, first=100 * start)
    assert len(driver.state.clients[CLIENT].lost) == MAX_LOST


# --- what was on a lane whose worker ended -------------------------------------------------------------------


def test_call_that_its_worker_died_in_falls_back_with_a_death() -> None:
    """The report shows the attempt as if the broker had sent it."""
    driver = settled("alpha", "beta")
    driver.dies("alpha", mark(1, 4))
    assert names(driver.call(8, after_lane=1, after_call=4)) == ["Probe"]
    (call,) = driver.state.workers["beta"].waiting
    assert (call.deaths, call.tried) == (1, {"alpha"})
    answer = driver.ran(driver.run_of(driver.ready("beta")))[-1]
    assert isinstance(answer, act.Answer)
    (attempt,) = answer.attempts
    assert (answer.attempt, attempt["kernel_id"], attempt["exit_signal"]) == (2, "alpha.silu", 11)


def test_worker_hears_of_neighbours_that_have_changed() -> None:
    """Else it would decline what a later lease promises. The lease waits until it knows."""
    driver = Driver("alpha", "beta", express=True)
    driver.route(2, dtype="float64")
    served(driver, 1)
    poison(driver)
    served(driver, SETTLED_CALLS, first=2, route=2)
    driver.tick(LIMITS["poison_quarantine_s"] + 1)
    driver(ev.PolicyChanged(Policy()))
    (allowed,) = of(served(driver, 1, first=8, route=2), act.SendAllow, act.SendLease)
    assert isinstance(allowed, act.SendAllow)
    assert decode(allowed.neighbours, Neighbours).neighbours == NEAR
    (lease,) = of(served(driver, 1, first=9, route=2), act.SendLease)
    assert isinstance(lease, act.SendLease)
    assert decode(lease.body, Lease).neighbours == NEAR


@pytest.mark.parametrize(("near", "deaths"), [(1, 1), (0, 0), (2, 0), (99, 0)])
def test_call_of_a_neighbour_comes_back_as_that_of_its_lease(near: int, deaths: int) -> None:
    """Its own route is new to the broker. One that tells of no lease of that lane is a new call."""
    driver = settled("alpha", "beta")
    driver.dies("alpha", mark(1, 4))
    driver(ev.RouteDefined(CLIENT, 2, route_body(extent=3), near))
    driver.call(8, 2, after_lane=1, after_call=4)
    (call,) = (*driver.state.workers["alpha"].waiting, *driver.state.workers["beta"].waiting)
    assert call.deaths == deaths


def test_call_that_killed_a_worker_on_a_lane_and_another_is_poison() -> None:
    """Two deaths are two deaths, wherever they happen."""
    driver = settled("alpha", "beta", "gamma")
    driver.dies("alpha", mark(1, 4))
    driver.call(8, after_lane=1, after_call=4)
    refuse = refusal(driver.dies("beta", driver.run_of(driver.ready("beta")).dispatch))
    assert refuse.error.code == "POISON"
    assert [attempt["backend"] for attempt in refuse.attempts] == ["alpha", "beta"]


@pytest.mark.parametrize("executing", [0, mark(1, 3), mark(2, 4), 4])
def test_call_that_its_worker_never_came_to_only_lost_its_place(executing: int) -> None:
    """The worker may have died in the call before, whose end was already read, or in that of another lane."""
    driver = settled("alpha")
    driver.dies("alpha", executing)
    assert driver.call(8, after_lane=1, after_call=4) == []
    driver.tick(1.0)
    run = driver.run_of(driver.ready("alpha"))
    answer = driver.ran(run)[-1]
    assert isinstance(answer, act.Answer)
    assert answer.attempts == []


def test_call_that_comes_back_after_the_restart_runs_there() -> None:
    """It did nothing, and its backend is well again."""
    driver = settled("alpha")
    driver.route(2, backend="alpha")
    served(driver, SETTLED_CALLS, route=2, first=4)
    driver.dies("alpha")
    driver.tick(1.0)
    driver.ready("alpha")
    assert driver.run_of(driver.call(8, route=2, after_lane=1, after_call=1)).attempt == 2


def test_death_counts_for_one_call_only() -> None:
    """One call was on the lane."""
    driver = settled("alpha", "beta")
    driver.dies("alpha", mark(1, 4))
    driver.call(8, after_lane=1, after_call=4)
    driver.call(9, after_lane=1, after_call=4)
    assert [call.deaths for call in driver.state.workers["beta"].waiting] == [1, 0]


@pytest.mark.parametrize("code", [RENEWAL_EXIT, STALLED_EXIT])
def test_order_is_no_excuse_for_a_call_of_a_lane(code: int) -> None:
    """Calls on a GPU have one."""
    driver = settled("alpha", "beta")
    driver.dies("alpha", mark(1, 4), exit_code=code)
    driver.call(8, after_lane=1, after_call=4)
    assert [call.deaths for call in driver.state.workers["beta"].waiting] == [1]


def test_death_is_kept_for_a_call_that_is_sent_back_for_its_digest() -> None:
    """It comes again, with the digest, and has still killed a worker."""
    driver = settled("alpha", "beta")
    driver.dies("alpha", mark(1, 4))
    poison(driver)
    assert refusal(driver.call(8, after_lane=1, after_call=4)).error.code == "DIGEST_REQUIRED"
    driver.call(9, after_lane=1, after_call=4, digest=b"g" * 16)
    assert [call.deaths for call in driver.state.workers["beta"].waiting] == [1]


def test_pinned_call_gets_the_death_of_its_lane() -> None:
    """Who insists on a backend gets its answer."""
    driver = Driver("alpha", "beta", express=True)
    driver.route(2, backend="alpha")
    served(driver, SETTLED_CALLS, route=2)
    driver.dies("alpha", mark(1, 4))
    refuse = refusal(driver.call(8, route=2, after_lane=1, after_call=4))
    assert "died (signal 11)" in refuse.error.message
    assert [attempt["backend"] for attempt in refuse.attempts] == ["alpha"]


# --- deadlines -----------------------------------------------------------------------------------------------


def test_overdue_call_of_a_lane_is_killed_and_falls_back_as_a_deadline() -> None:
    """Its client watches the clock; only the broker can kill. A deadline is no crash."""
    driver = settled("alpha", "beta")
    assert driver(ev.LaneOverdue(CLIENT, 1, 1, 2.0, 4)) == [act.Kill("alpha", 1), act.RevokeLane(1, 1)]
    driver.dies("alpha", mark(1, 4), exit_code=-9)
    driver.call(8, after_lane=1, after_call=4)
    (call,) = driver.state.workers["beta"].waiting
    assert (call.deaths, [attempt["code"] for attempt in call.attempts]) == (0, ["DEADLINE"])


def test_only_the_call_that_was_overdue_is_blamed() -> None:
    """The worker may have come to the next one, or to the broker's, by the time the kill reaches it."""
    driver = settled("alpha", depth=2)
    driver.route(2, backend="alpha")
    run = driver.run_of(driver.call(8, route=2))
    driver(ev.LaneOverdue(CLIENT, 1, 1, 2.0, 4))
    assert not of(driver.dies("alpha", run.dispatch, exit_code=-9), act.Refuse)
    assert [call.seq for call in driver.state.workers["alpha"].waiting] == [8]
    assert driver.call(9, after_lane=1, after_call=5) == []  # it waits for the restart, too


def test_overdue_report_of_another_client_is_not_believed() -> None:
    """It would kill its neighbour's worker."""
    driver = settled()
    driver.join(OTHER, 2)
    assert driver(ev.LaneOverdue(OTHER, 1, 1, 2.0, 4)) == []
    assert driver(ev.LaneOverdue(CLIENT, 99, 1, 2.0, 4)) == []


@pytest.mark.parametrize("nonsense", ["", "call 4 ends as 9"])
def test_calls_that_no_control_page_names_end_few_workers(nonsense: str) -> None:
    """A worker that never answers must not hold its client for ever; but the client may have made the call up, and it
    can write the lane's page."""
    driver = settled("alpha", backoff_s=0.0)
    claim = ev.LaneOverdue(CLIENT, 1, 1, 60.0, 4, is_running=False, nonsense=nonsense)
    assert driver(claim) == [act.Kill("alpha", 1), act.RevokeLane(1, 1)]
    client = driver.state.clients[CLIENT]
    assert len(client.forced_s) == 1
    client.forced_s.extend([driver.now_s] * (MAX_FORCED - 1))
    other = settled("alpha")
    other.state.clients[CLIENT].forced_s.extend([other.now_s] * MAX_FORCED)
    assert other(claim) == []
    other.now_s += FORCED_WINDOW_S + 1
    assert other(claim)[0] == act.Kill("alpha", 1)


def waiting_head(**more: float) -> tuple[Driver, act.Run]:
    """A call with 2 s behind a lane's call; limits.timeout_s is 5."""
    driver = settled("alpha", "beta", timeout_s=5.0)
    return driver, driver.run_of(driver.call(8, timeout_s=2.0, **more))


def look(driver: Driver, after_s: float, executing: int) -> list[act.Action]:
    driver.now_s += after_s
    return driver(ev.Tick({("alpha", 1): executing}))


def test_head_that_waits_for_a_call_of_a_lane_gets_more_time() -> None:
    """The clock measures the kernel, not the wait before it."""
    driver, _ = waiting_head()
    assert look(driver, 2.0, mark(1, 4)) == []
    assert driver.state.wakeup_s <= driver.now_s + 2.0
    assert look(driver, 2.0, mark(1, 5)) == []
    assert look(driver, 2.0, 4) == [act.Kill("alpha", 1), act.RevokeLane(1, 1)]


def test_call_of_a_lane_that_others_wait_for_ends_in_the_end() -> None:
    """Its client may be gone, and nobody else watches its clock. The head is not to blame."""
    driver, _ = waiting_head()
    ticks = 0
    while not of(look(driver, 2.0, mark(1, 4)), act.Kill):
        ticks += 1
    assert ticks == 3  # found at 2 s, over at 2 + 5 s, seen at 8 s
    driver.dies("alpha", mark(1, 4), exit_code=-9)
    (call,) = driver.state.workers["beta"].waiting
    assert [attempt["phase"] for attempt in call.attempts] == ["queued"]


def test_call_that_was_due_is_blamed_although_a_lane_came_next() -> None:
    """The worker was killed for its head."""
    driver, run = waiting_head()
    assert of(look(driver, 2.0, run.dispatch), act.Kill)
    driver.dies("alpha", mark(1, 4), exit_code=-9)
    (call,) = driver.state.workers["beta"].waiting
    assert [attempt["code"] for attempt in call.attempts] == ["DEADLINE"]


# --- what lanes tell -----------------------------------------------------------------------------------------


def test_calls_of_a_lane_are_counted_and_timed() -> None:
    """They must not be invisible in `lz status`, nor to the choice of kernels."""
    driver = settled()
    worker, cell = driver.state.workers["alpha"], driver.state.clients[CLIENT].routes[1].signature.cell
    before = worker.answered, cell.counts["alpha.silu"]
    driver(ev.LanePolled(1, 50, 1, 5000))
    assert (worker.answered, cell.counts["alpha.silu"]) == (before[0] + 50, before[1] + 1)
    driver(ev.LanePolled(1, 1, 0, 0))  # one that did not run to its end
    assert (worker.answered, cell.counts["alpha.silu"]) == (before[0] + 51, before[1] + 1)


def test_what_an_ended_lane_tells_is_dropped() -> None:
    """The look and the end may cross."""
    driver = settled()
    driver.dies("alpha")
    assert driver(ev.LanePolled(1, 50, 1, 5000)) == []


def test_lease_names_the_decision_that_the_broker_would_make_again() -> None:
    """The report of a call on a lane is made from it."""
    driver = Driver(express=True)
    sent: list[act.Action] = []
    for seq in range(1, SETTLED_CALLS + 1):
        sent += served(driver, 1, first=seq)
    decisions = {a.decision: decode(a.body, Decision) for a in sent if isinstance(a, act.SendDecision)}
    (lease,) = of(sent, act.SendLease)
    assert isinstance(lease, act.SendLease)
    assert decisions[lease.decision].kernel_id == "alpha.silu"
    assert driver.state.workers["alpha"].state is WorkerState.READY


def test_retired_arena_leaves_the_lease() -> None:
    """The worker declines calls whose memory it does not have, and the broker lends it again."""
    driver = settled()
    assert names(driver(ev.ArenaGivenUp(CLIENT, 1))) == ["TakeBackArena", "CloseArena"]
    assert driver.state.leases


def test_plan_of_a_forgotten_route_goes_with_its_lease() -> None:
    """The worker declines what still comes for it."""
    driver = settled()
    assert names(driver(ev.RouteForgotten(CLIENT, 1))) == ["SendDrop"]
    assert driver(ev.PolicyChanged(Policy())) == []
    assert driver(ev.RouteDefined(CLIENT, 2, route_body())) == []


def test_no_lease_goes_by_a_decision_of_an_earlier_policy() -> None:
    """Its client would tell what the earlier one said of each call, for as long as the lease holds."""
    driver = Driver("alpha", "beta", express=True)
    served(driver, SETTLED_CALLS - 1)
    on_its_way = driver.serve(SETTLED_CALLS)
    driver(ev.PolicyChanged(Policy(weights=Weights(perfdb=1.0))))
    assert not of(driver.ran(on_its_way), act.SendLease)
    (decision,) = of(actions := served(driver, 1, first=9), act.SendDecision)
    (lease,) = of(actions, act.SendLease)
    assert lease.decision == decision.decision
