"""Clients that ask the broker for lifted calls in ways that are none: each gets an error that says so, and nobody else
notices. Over the GPU of threads. What hostile workers say: tests/unit/broker/lifting/test_lifts.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.process.gpu_site import close, randn, report, silu, soft
from tests.process.harness import Site, open_files
from tests.process.lifted_site import LiftedSites, kernels, lift, lifted_site, lifted_store

import layerzero as lz
from layerzero.ipc.lifting.form import digest

__all__ = ["kernels", "lifted_site", "lifted_store", "soft"]
GROWS = [[[1, 0], [0, 0]]] * 2
HUGE = 1 << 62


@pytest.fixture
def lifted(lifted_site: LiftedSites) -> Iterator[tuple[Site, lz.Session, int]]:
    """A session with a lifted route, and that route's number. All goes on afterwards."""
    site = lifted_site().start()
    session = site.connect()
    x, values = randn(32, 16)
    lift(lambda: lz.silu(x))
    broker = site.broker_pid
    (route,) = session.routes._by_number
    yield site, session, route
    assert session.is_alive
    assert site.broker_pid == broker
    assert site.events("peer.refused") == site.events("client.dropped") == []
    close(lz.silu(x), silu(values))
    assert report().path == "lifted"
    assert session.ask("lift", route=route, alignments=[256, 256])["state"] == "ready"


def test_only_what_was_granted_is_handed_over(lifted: tuple[Site, lz.Session, int], lifted_store: Any) -> None:
    _, session, _ = lifted
    (lifted_store / "lifted" / "code" / "secret").write_text("not machine code")
    files = open_files()
    for name in ("", "secret", "../../x", "../calls", "/etc/passwd", "x" * 64, digest(b"unknown"), "\0" * 64, "é" * 64):
        with pytest.raises(lz.InvalidArgument, match="no lifted call or machine code is known as"):
            session.link.get_lifted(name)
    assert open_files() == files


ROUTES: list[Any] = [None, 0, -1, 999, HUGE, "1", 1.5, [], {}, True]
ALIGNMENTS: list[Any] = [
    *(None, [], [256], [256] * 3, [256, 3], [256, -1], [256, "16"], [256, 16.0], [256, None], [256, []], [True, True]),
    *("256", {"0": 256}, [256, HUGE], [256] * 10_000),
]


@pytest.mark.parametrize("method", ["lift", "lift_ahead"])
def test_questions_about_what_is_no_route_are_answered(lifted: tuple[Site, lz.Session, int], method: str) -> None:
    _, session, route = lifted
    more = {"count": 1, "grows": GROWS} if method == "lift_ahead" else {}
    for number in ROUTES:
        if number != route or type(number) is bool:
            with pytest.raises(lz.InvalidArgument, match="the number of a route of this client"):
                session.ask(method, route=number, alignments=[256, 256], **more)
    for alignments in ALIGNMENTS:
        with pytest.raises(lz.InvalidArgument, match="needs `alignments`, 2 of"):
            session.ask(method, route=route, alignments=alignments, **more)
    with pytest.raises(lz.InvalidArgument):
        session.ask(method)


def test_the_routes_of_others_are_nobodys(lifted: tuple[Site, lz.Session, int]) -> None:
    """Numbers are of each client's own: another one has none by that number."""
    site, _, route = lifted
    other = site.python(
        f"import sys\nsession = lz.connect(runtime_dir=sys.argv[1])\n"
        f"try: session.ask('lift', route={route}, alignments=[256, 256])\n"
        f"except lz.InvalidArgument as exc: print(exc.code, flush=True)\n"
    )
    assert other.communicate()[0] == "INVALID_ARGUMENT\n"


GROWTHS: list[Any] = [
    *(None, [], [None], [None] * 3, 7, "grows", [7, 7], [[1], [1]], [[[1], [0]]] * 2, [[[1, 0, 0], [0, 0, 0]]] * 2),
    *([[["1", 0], [0, 0]]] * 2, [[[1.5, 0], [0, 0]]] * 2, [[[True, 0], [0, 0]]] * 2, [[[HUGE, 0], [0, 0]]] * 2),
    *([[[-100, 0], [0, 0]]] * 2, [[[1, 0], [0, 0]], None], [[[0, 0], [HUGE, HUGE]]] * 2, [[[1, 0], [-500, 0]]] * 2),
]


def test_growth_that_is_none_is_refused(lifted: tuple[Site, lz.Session, int]) -> None:
    """Shapes that no call could have."""
    _, session, route = lifted
    for grows in GROWTHS:
        with pytest.raises(lz.InvalidArgument):
            session.ask("lift_ahead", route=route, alignments=[256, 256], count=2, grows=grows)
    for count in (None, 0, -1, 65, HUGE, 1.0, "1", True, []):
        with pytest.raises(lz.InvalidArgument, match="lift_ahead needs `count`, 1 to 64"):
            session.ask("lift_ahead", route=route, alignments=[256, 256], count=count, grows=GROWS)


def test_faults_of_what_nobody_launched_change_nothing(lifted: tuple[Site, lz.Session, int]) -> None:
    site, session, _ = lifted
    for numbers in (None, 1, "1", [None], ["1"], [1.5], [[]]):
        with pytest.raises(lz.InvalidArgument, match="lift_fault needs `numbers`"):
            session.ask("lift_fault", numbers=numbers)
    assert session.ask("lift_fault", numbers=[0, -1, 999, HUGE]) == {"kernels": []}
    assert site.events("lifted.faulted") == []
