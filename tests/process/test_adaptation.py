"""Kernels that take inputs only contiguous, and strided arrays: the client copies, or policy refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.process.harness import Site, wait_until

import layerzero as lz
from layerzero.client.connection.report import ADAPTED

Make = Callable[..., Site]


@pytest.fixture(scope="module")
def dense(store: Path) -> Iterator[Site]:
    """A broker with the backend `dense`, the best for silu, whose kernel takes contiguous arrays alone."""
    site = Site(store)
    site.add_backend("dense", priority=90, requires_contiguous=True)
    try:
        yield site.start()
    finally:
        site.stop()


@pytest.fixture
def strided(dense: Site) -> Iterator[np.ndarray]:
    """A transposed view in shared memory, 6 x 4."""
    dense.connect()
    yield lz.share(np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)).T
    lz.configure(strict_mode=None, allow_adaptation=None)
    lz.disconnect()


def expected(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def report() -> lz.SelectionReport:
    found = lz.last_report()
    assert found is not None
    return found


def is_adapted(found: lz.SelectionReport, x: np.ndarray) -> bool:
    assert found.plan is not None
    copies = [(c.arg, c.nbytes, c.where) for c in found.copies if c.reason == ADAPTED]
    return (found.backend, copies, found.plan.transforms) == (
        "dense",
        [("x", x.nbytes, "client")],
        ("contiguous x",),
    )


def test_input_is_copied_and_the_report_says_for_whom(strided: np.ndarray) -> None:
    """Each time, also when the client knows it beforehand; contiguous arrays stay where they are."""
    for _ in range(3):
        assert np.allclose(lz.silu(strided), expected(strided))
        assert is_adapted(report(), strided)
        assert "the chosen kernel takes it only contiguous" in str(report())
    flat = lz.share(np.ones((6, 4), np.float32))
    assert np.allclose(lz.silu(flat), expected(flat))
    assert (report().backend, report().copies) == ("dense", ())


def test_explanation_names_the_copy_before_it_is_made(strided: np.ndarray) -> None:
    found = lz.explain("silu", strided)
    assert found.plan is not None
    assert (found.backend, found.plan.transforms) == ("dense", ("contiguous x",))


def test_out_and_futures_are_served_too(strided: np.ndarray) -> None:
    out = lz.empty(strided.shape)
    assert lz.silu(strided, out=out) is out
    assert np.allclose(out, expected(strided))
    assert is_adapted(report(), strided)
    futures = [lz.submit("silu", strided * 1) for _ in range(2)] + [lz.submit("silu", strided) for _ in range(2)]
    assert all(np.allclose(future.result(), expected(strided)) for future in futures)
    assert futures[-1].report is not None
    assert is_adapted(futures[-1].report, strided)
    sideways = lz.empty((4, 6)).T
    lz.silu(strided, out=sideways)
    assert np.allclose(sideways, expected(strided))
    rejected = {r.code for c in report().candidates if c.backend == "dense" for r in c.reasons}
    assert (report().backend, rejected) == ("alpha", {"NOT_CONTIGUOUS"})


@pytest.mark.parametrize("settings", [{"strict_mode": True}, {"allow_adaptation": False}])
def test_policy_may_refuse_the_copy(strided: np.ndarray, settings: dict[str, bool]) -> None:
    """Then another backend serves, or nobody; each says why."""
    lz.silu(strided)
    lz.configure(**settings)
    assert np.allclose(lz.silu(strided), expected(strided))
    rejected = [r.code for c in report().candidates if c.backend == "dense" for r in c.reasons]
    assert (report().backend, report().copies, rejected) == ("alpha", (), ["NOT_CONTIGUOUS"])
    with pytest.raises(lz.NoBackend, match="NOT_CONTIGUOUS") as caught:
        lz.silu(strided, backend="dense")
    reasons = {c.backend: [r.code for r in c.reasons] for c in caught.value.report.candidates}
    assert reasons["dense"] == ["NOT_CONTIGUOUS"]


def test_policy_file_takes_effect_for_calls_that_the_client_adapts_by_itself(new_site: Make) -> None:
    """What a client knows of a kernel's needs it forgets within a second or so."""
    site = new_site()
    site.add_backend("dense", priority=90, requires_contiguous=True)
    site.start().connect()
    x = lz.share(np.ones((4, 6), np.float32)).T
    lz.silu(x)
    assert report().backend == "dense"
    site.set_policy("strict_mode: true\n")
    wait_until(lambda: lz.silu(x) is not None and report().backend == "alpha")
    assert report().copies == ()
    site.set_policy("")
    wait_until(lambda: lz.silu(x) is not None and report().backend == "dense")
    assert is_adapted(report(), x)


def test_call_is_sent_back_for_copies_once(dense: Site, strided: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the copies did not help, the call forbids more of them, and the broker keeps to that."""
    session = lz.connect(runtime_dir=dense.folder)
    lz.silu(strided)
    adapt, rigid = session._adapt, []

    def forgetful(submitted, error):  # type: ignore[no-untyped-def]
        """As when policy asks for other copies the second time."""
        object.__setattr__(submitted, "adapted", frozenset({"x"}))
        request = adapt(submitted, error)
        rigid.append(request.is_rigid)
        return request

    monkeypatch.setattr(session, "_adapt", forgetful)
    session.routes.clear()
    assert np.allclose(lz.silu(strided), expected(strided))
    assert (rigid, report().backend, report().copies) == ([True], "alpha", ())
    with pytest.raises(lz.NoBackend, match="NOT_CONTIGUOUS"):
        lz.silu(strided, backend="dense")
