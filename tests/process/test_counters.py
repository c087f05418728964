"""What is counted of calls, whichever way they took: each once, and nothing is lost with a client."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import zmq
from tests.backends.toy import KILL, RAISE
from tests.process.harness import Site, bare_client, in_threads, is_paused, wait_until
from tests.process.planned import X as MATRIX
from tests.process.planned import block, settled
from tests.process.test_express import X, bad, settle, settled_client, settled_site

import layerzero as lz
from layerzero.ipc.shm import counter_page, memory
from layerzero.ipc.shm.counter_page import CounterPage
from layerzero.ipc.shm.counter_words import Label, bucket_of
from layerzero.ipc.transport import control, messages
from layerzero.ipc.transport.counter_messages import AddCounters, CountersAdded

Counts = Counter[tuple[str, ...]]


def counts() -> Counts:
    """Calls that ended well, by op, backend and path."""
    return Counter({(row["op"], row["backend"], row["path"]): row["calls"] for row in lz.status()["calls"]})


def coded(what: str) -> Counts:
    """Of "errors" or "fallbacks": by op, backend and code."""
    return Counter({(row["op"], row["backend"], row["code"]): row["count"] for row in lz.status()[what]})


def grown(before: Counts, after: Counts) -> dict[tuple[str, ...], int]:
    return dict(after - before)


def reported(call: Callable[[], object], times: int) -> Counts:
    """What the reports of these calls say of them."""
    seen: Counts = Counter()
    for _ in range(times):
        call()
        report = lz.last_report()
        assert report is not None
        seen[report.op, str(report.backend), report.path] += 1
    return seen


@pytest.fixture
def connected(connected: Site) -> Site:
    connected.wait_ready("alpha", "beta")
    settle()
    return connected


@pytest.mark.parametrize("kwargs", [{}, {"timeout_s": 60}], ids=["compiled", "python"])
def test_calls_on_a_lane_are_counted_each_once(connected: Site, kwargs: dict[str, Any]) -> None:
    """They pass the broker by; their client counts them, in C or not, and what they copied."""
    before, copied = counts(), lz.status()["copied_bytes"]
    seen = reported(lambda: lz.silu(X, **kwargs), 50)
    assert seen["silu", "alpha", "express"] > 40
    assert grown(before, counts()) == dict(seen)
    assert sum(row["bytes"] for row in lz.status()["copied_bytes"]) - sum(row["bytes"] for row in copied) == 50 * 32


def test_calls_by_the_broker_are_counted_by_it(new_site: Callable[..., Site]) -> None:
    """Where there are no lanes."""
    site = new_site(express=False)
    site.connect()
    site.wait_ready("alpha", "beta")
    before = counts()
    seen = reported(lambda: lz.silu(X), 20)
    assert grown(before, counts()) == dict(seen) == {("silu", "alpha", "broker"): 20}
    row = next(row for row in lz.status()["calls"] if row["path"] == "broker" and row["op"] == "silu")
    assert 0 < row["mean_us"] < 60e6


def test_nothing_is_counted_where_settings_say_so(new_site: Callable[..., Site]) -> None:
    """Calls go on; the broker counts its own."""
    settled_site(new_site, counts=False)
    before = counts()
    assert reported(lambda: lz.silu(X), 20)["silu", "alpha", "express"] == 20
    assert grown(before, counts()) == {}
    assert lz.session().link.counters.why_not


def test_submitted_calls_count_whether_somebody_takes_their_results_or_not(connected: Site) -> None:
    """A call whose future is dropped has been made all the same."""
    before = counts()
    kept = [lz.submit(lz.silu, X) for _ in range(20)]
    reports = [future.report for future in kept if future.result() is not None]
    for _ in range(70):  # more than there are places on a lane: some are seen when their places are taken again
        lz.submit(lz.silu, X)
    behind = 0
    while not behind or lz.last_report().path != "express":  # type: ignore[union-attr]
        behind += lz.silu(X) is not None
    wait_until(lambda: lz.session().ask("metrics")["open_calls"] == 0)  # those that found no place on the lane
    lz.disconnect()
    connected.connect()
    assert all(report is not None for report in reports)
    found = grown(before, counts())
    assert sum(n for (op, _, _), n in found.items() if op == "silu") == 90 + behind
    assert found["silu", "alpha", "express"] > 60


def test_threads_lose_no_count(connected: Site) -> None:
    """The interpreter's lock is let go of while the worker works."""
    before = counts()

    def work() -> None:
        for _ in range(100):
            lz.silu(X)

    in_threads(4, work)
    assert sum(grown(before, counts()).values()) == 400


def test_the_steps_of_a_plan_count_as_calls(connected: Site) -> None:
    """They cross as one; each is a call of its op."""
    plan = settled(lz.plan(block), MATRIX)
    before = counts()
    for _ in range(30):
        plan(MATRIX)
    found = grown(before, counts())
    assert found == {("silu", "alpha", "express"): 60, ("matmul", "alpha", "express"): 30}


def test_a_call_in_this_process_counts_once(new_site: Callable[..., Site]) -> None:
    """The broker hears of each such call, for its kernel's time; its client counts it."""
    site = new_site()
    site.set_policy("backend_isolation: {alpha: in_process}\n")
    site.start().connect()

    def is_here() -> bool:
        lz.silu(X)
        report = lz.last_report()
        return report is not None and report.path == "in_process"

    wait_until(is_here)
    before = counts()
    seen = reported(lambda: lz.silu(X), 30)
    assert seen["silu", "alpha", "in_process"] > 20
    assert grown(before, counts()) == dict(seen)


def test_what_a_killed_client_has_counted_stays(connected: Site) -> None:
    """SIGKILL, between two calls: the broker reads its page once more."""
    before = counts()
    client = settled_client(
        connected,
        "from collections import Counter\n"
        "import sys\n"
        "seen = 0\n"
        "while seen < 500:\n"
        "    lz.silu(x)\n"
        "    seen += lz.last_report().path == 'express'\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n",
        stdin=-1,
    )
    with client:
        assert client.stdout is not None
        assert client.stdout.readline() == "done\n"
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
    wait_until(lambda: len(lz.status()["clients"]) == 1)
    assert grown(before, counts())["silu", "alpha", "express"] >= 501  # and that which settled it


def test_a_worker_that_dies_is_a_fallback_by_its_reason(connected: Site) -> None:
    """The call itself ends well, once, elsewhere."""
    before, fallbacks, errors = counts(), coded("fallbacks"), coded("errors")
    restarts = sum(row["count"] for row in lz.status()["restarts"] if row["cause"] == "crash")
    lz.silu(bad(KILL, "alpha"))
    report = lz.last_report()
    assert report is not None
    assert report.backend == "beta"
    assert grown(fallbacks, coded("fallbacks")) == {("silu", "alpha", "BACKEND_ERROR"): 1}
    assert grown(before, counts()) == {("silu", "beta", "broker"): 1}
    assert coded("errors") == errors
    assert sum(row["count"] for row in lz.status()["restarts"] if row["cause"] == "crash") == restarts + 1


def test_an_attempt_that_fails_on_a_lane_is_counted_by_its_client(connected: Site) -> None:
    """The worker lives, and the broker has not seen it."""
    before, fallbacks = counts(), coded("fallbacks")
    lz.silu(bad(RAISE, "alpha"))
    report = lz.last_report()
    assert report is not None
    failed = [one for one in report.attempts if one.outcome]
    assert sum(grown(fallbacks, coded("fallbacks")).values()) == len(failed)
    assert grown(before, counts()) == {("silu", "beta", "broker"): 1}


def test_a_call_that_nobody_serves_is_an_error(connected: Site) -> None:
    """By its code; it is no call that ended well."""
    before, errors = counts(), coded("errors")
    with pytest.raises(lz.BackendError):
        lz.silu(bad(RAISE))
    assert grown(before, counts()) == {}
    [((op, _, code), count)] = grown(errors, coded("errors")).items()
    assert (op, code, count) == ("silu", "BACKEND_ERROR", 1)


def test_a_call_whose_client_has_gone_is_cancelled(connected: Site) -> None:
    """Nobody hears how it ends."""
    before, errors = counts(), coded("errors")
    client = settled_client(
        connected,
        "x = np.array([fault(PAUSE, 'alpha'), *x[1:]], np.float32)\nx = np.stack([x, x])\nlz.silu(x)\n",
    )
    with client:
        pid = connected.backend("alpha")["pid"]
        wait_until(lambda: is_paused(pid))
        client.kill()
        client.wait()
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: coded("errors") != errors)
    [((op, _, code), count)] = grown(errors, coded("errors")).items()
    assert (op, code, count) == ("silu", "CANCELLED", 1)
    assert ("silu", "alpha", "express") in grown(before, counts())


# --- pages of those who mean harm


class Bare:
    """A client of bytes with a page of counters."""

    def __init__(self, site: Site, context: zmq.Context[Any]) -> None:
        self.sock, self.dealer = bare_client(site, context)
        self.fd = memory.create_memfd("counters", counter_page.PAGE_BYTES)
        self.page = CounterPage(self.fd, writable=True)

    def show(self, fds: Sequence[int] | None = None) -> messages.Message:
        control.send(self.sock, AddCounters(), (self.fd,) if fds is None else tuple(fds))
        return control.receive(self.sock, CountersAdded, messages.Refused)[0]

    def row(self, op: str = "silu", kernel_id: str = "alpha.silu", path: str = "express") -> int:
        return self.page.open_row(Label(op, kernel_id, path))

    def close(self) -> None:
        self.sock.close()
        self.dealer.close(0)
        self.page.close()
        os.close(self.fd)


@pytest.fixture
def hostile(connected: Site) -> Iterator[Bare]:
    context = zmq.Context()
    made = Bare(connected, context)
    yield made
    made.close()
    context.term()


def spoil_shrinking(bare: Bare) -> None:
    bare.page._words[(counter_page.ROW_BYTES + counter_page.BUCKETS_AT) // 8 + bucket_of(2_000)] = 3


def spoil_growing(bare: Bare) -> None:
    bare.page._words[(counter_page.ROW_BYTES + counter_page.BUCKETS_AT) // 8] = 1 << 63


def spoil_rows(bare: Bare) -> None:
    bare.page._words[0] = 1 << 40


def spoil_label(bare: Bare) -> None:
    bare.row(kernel_id="alpha.nothing")
    bare.page.count(2, 1, 0)


def spoil_op(bare: Bare) -> None:
    bare.row(op='silu"} 1\nlayerzero_up{x="', path="express")
    bare.page.count(2, 1, 0)


def spoil_path(bare: Bare) -> None:
    bare.row(path="none of them")


def spoil_text(bare: Bare) -> None:
    bare.row()
    bare.page._bytes[2 * counter_page.ROW_BYTES + 8] = 255


def spoil_length(bare: Bare) -> None:
    bare.row()
    bare.page._words[2 * counter_page.ROW_BYTES // 8] = 1 << 62


@pytest.mark.parametrize(
    "spoil",
    [spoil_shrinking, spoil_growing, spoil_rows, spoil_label, spoil_op, spoil_path, spoil_text, spoil_length],
)
def test_words_that_make_no_sense_are_not_taken(connected: Site, hostile: Bare, spoil: Callable[[Bare], None]) -> None:
    """What was read before stays, the page is read no more, the client goes on; others' counts are theirs."""
    before = counts()
    hostile.row()
    for _ in range(7):
        hostile.page.count(1, 2_000, 0)
    assert isinstance(hostile.show(), CountersAdded)
    assert grown(before, counts()) == {("silu", "alpha", "express"): 7}
    spoil(hostile)
    assert grown(before, counts()) == {("silu", "alpha", "express"): 7}
    refused = len(connected.events("counters.refused"))
    hostile.page.count(1, 2_000, 0)
    lz.silu(X)
    assert sum(grown(before, counts()).values()) == 8
    assert len(lz.status()["clients"]) == 2
    assert len(connected.events("counters.refused")) == refused > 0


def test_a_page_that_is_none_ends_its_client(connected: Site, hostile: Bare) -> None:
    """One that could be cut short would end the broker."""
    open_file = os.memfd_create("unsealed")
    os.ftruncate(open_file, counter_page.PAGE_BYTES)
    answer = hostile.show([open_file])
    os.close(open_file)
    assert isinstance(answer, messages.Refused)
    assert "seals" in str(answer.error)
    wait_until(lambda: len(lz.status()["clients"]) == 1)


def test_there_is_one_page_for_a_client(connected: Site, hostile: Bare) -> None:
    """Who shows two breaks the protocol."""
    assert isinstance(hostile.show(), CountersAdded)
    answer = hostile.show()
    assert isinstance(answer, messages.Refused)
    assert "already" in str(answer.error)
