"""Kernels that compile, with a worker whose kernel really does: it compiles a module into its environment's cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.process.compiling import BROKEN, QUICK, SLOW, provider
from tests.process.harness import PATIENCE_S, Site, wait_until
from tests.process.join_site import Agent
from tests.process.test_reload import restart

import layerzero as lz
from layerzero.ipc.errors import DeadlineExceeded, NoBackend

X = np.linspace(-4, 4, 2 * SLOW, dtype=np.float32).reshape(2, SLOW)


class Compiling:
    """A site with a backend that compiles for each length of rows, and that is the best one then."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site = site
        self._notes = folder
        os.mkfifo(folder / "gate")
        env = {"LZ_JIT_CACHE": "{cache}/silu", "LZ_JIT_NOTES": str(folder)}
        site.use_store(folder / "store")  # with caches that are empty
        site.add_backend("jit", provider=provider(), env=env, needs_jit=True, compiled_for=["row"])
        self.session = site.start().connect()

    def compiled(self, row: int) -> list[str]:
        """Command lines of the processes that compiled for rows of this length, or began to."""
        file = self._notes / "compiled"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.startswith(f"{row} ")]

    def open_gate(self) -> None:
        """Let the compilation that waits go on."""
        os.close(os.open(self._notes / "gate", os.O_WRONLY))

    def call(self, row: int = SLOW) -> str | None:
        """Which backend answered, rightly."""
        x = np.linspace(-4, 4, 2 * row, dtype=np.float32).reshape(2, row)
        assert np.allclose(lz.silu(x), x / (1 + np.exp(-x)))
        report = lz.last_report()
        assert report is not None
        return report.backend

    def begin(self) -> None:
        """Call until the slow compilation has begun: before it, the environment is probed."""
        wait_until(lambda: self.call() == "alpha" and self.compiled(SLOW))


@pytest.fixture
def compiling(new_site: Callable[..., Site], tmp_path: Path) -> Compiling:
    return Compiling(new_site(), tmp_path)


def reasons(row: int = SLOW) -> list[str]:
    """Why the kernel would not serve such a call."""
    report = lz.explain("silu", np.zeros((2, row), np.float32))
    return [reason.code for c in report.candidates if c.kernel_id == "jit.silu" for reason in c.reasons]


def test_calls_go_to_another_kernel_until_it_is_compiled_once_and_for_all(compiling: Compiling) -> None:
    """No call pays for a compilation, neither now nor after a restart."""
    compiling.begin()
    assert reasons() == ["NOT_COMPILED"]
    assert compiling.call() == "alpha"
    compiling.open_gate()
    wait_until(lambda: compiling.call() == "jit")
    (who,) = compiling.compiled(SLOW)
    assert "layerzero.workers.compiler" in who
    restart(compiling.site)
    assert compiling.call() == "jit"
    assert compiling.compiled(SLOW) == [who]


def test_a_joined_kernel_is_compiled_where_its_worker_is(new_site: Callable[..., Site], tmp_path: Path) -> None:
    """The broker has no environment of it; its agent has, and a child of that compiles."""
    compiling = Compiling(new_site(joined="jit"), tmp_path)
    agent = Agent(compiling.site, "jit", LAYERZERO_WORKER_CACHE=str(tmp_path / "caches"))
    try:
        compiling.begin()
        assert reasons() == ["NOT_COMPILED"]
        compiling.open_gate()
        wait_until(lambda: compiling.call() == "jit")
        assert "layerzero.workers.compiler" in compiling.compiled(SLOW)[0]
        wait_until(lambda: compiling.call(BROKEN) == "alpha" and reasons(BROKEN) == ["COMPILE_FAILED"])
        assert (tmp_path / "caches" / "silu" / f"silu_{SLOW}.pyc").exists()
    finally:
        agent.end()


def test_failure_is_told_and_can_be_tried_again(compiling: Compiling) -> None:
    """Whoever insists on the kernel needs the compiler's words; all others need an answer."""
    wait_until(lambda: compiling.call(BROKEN) == "alpha" and reasons(BROKEN) == ["COMPILE_FAILED"])
    with pytest.raises(NoBackend, match="nvcc: error: no image for this row"):
        lz.silu(np.zeros((2, BROKEN), np.float32), backend="jit")
    assert "no image" in compiling.site.events("kernel.compile_failed")[0]["cause"]
    check = next(c for c in lz.readiness_check(starts_workers=False).checks if c.name == "compiled kernels")
    assert not check.ok
    assert "no image" in check.detail
    assert len(compiling.compiled(BROKEN)) == 1
    compiling.session.ask("reset", backend="jit")
    wait_until(lambda: compiling.call(BROKEN) == "alpha" and len(compiling.compiled(BROKEN)) == 2)


def test_a_pinned_call_waits_for_the_compilation_up_to_its_deadline(compiling: Compiling) -> None:
    """Nobody else may serve it, and its caller must be able to say for how long to wait."""
    with pytest.raises(DeadlineExceeded, match=r"jit\.silu is being compiled for row=500"):
        lz.silu(X, backend="jit", timeout_s=0.2)
    future = lz.submit("silu", X, backend="jit", timeout_s=PATIENCE_S)
    compiling.open_gate()
    assert np.allclose(future.result(), X / (1 + np.exp(-X)))
    report = future.report
    assert report is not None
    assert [a.outcome for a in report.attempts] == ["NOT_COMPILED", None]
    assert "until the kernel was compiled for row=500" in report.attempts[0].detail


def test_warm_up_compiles_before_the_first_call(compiling: Compiling) -> None:
    """That is how no call ever has to go elsewhere."""
    report = lz.warmup("silu", np.zeros((2, QUICK), np.float32))
    assert report.ok, str(report)
    assert report.runs[0].kernel_id == "jit.silu"
    assert compiling.call(QUICK) == "jit"
    (who,) = compiling.compiled(QUICK)
    assert "layerzero.workers.compiler" in who


def test_cache_belongs_to_one_user_and_one_environment(compiling: Compiling) -> None:
    """What lies there is loaded as code; gc takes it away with its environment."""
    lz.warmup("silu", np.zeros((2, QUICK), np.float32))
    store = Path(compiling.site.environ["LAYERZERO_STORE"])
    (cache,) = (store / "caches").glob("jit-*/*")
    assert (cache.stat().st_mode | cache.parent.stat().st_mode) & 0o777 == 0o700
    assert (cache / "silu" / f"silu_{QUICK}.pyc").exists()


def test_a_broker_that_ends_takes_its_compilations_along(compiling: Compiling) -> None:
    """The fixture finds processes that are left."""
    compiling.begin()
    compiling.session.ask("shutdown")
