"""`lz selftest` finds a right installation right, and a wrong one wrong."""

from __future__ import annotations

from collections.abc import Callable

from tests.process.harness import BACKENDS, Site
from tests.process.test_cli import FAILED, USAGE, data, lz

TOY = (BACKENDS / "toy.py").read_text()


def test_right_results_a_lane_and_a_death(new_site: Callable[..., Site]) -> None:
    """Each is a row; what runs here already is left alone."""
    site = new_site()
    found = {one["name"]: one for one in data(lz(site, "selftest", "alpha", "beta", "--json"))["checks"]}
    assert list(found) == ["broker", "alpha", "beta", "express lane", "death of a worker"]
    assert {one["outcome"] for one in found.values()} == {"ok"}
    assert "silu, matmul: at most" in found["alpha"]["detail"]
    assert "alpha's worker was killed" in found["death of a worker"]["detail"]
    assert site.broker_pid is None


def test_a_kernel_that_computes_wrong_is_named(new_site: Callable[..., Site]) -> None:
    """With how far it is from the reference, and an exit code for scripts."""
    site = new_site()
    right = "np.exp(-x)))\n"
    assert TOY.count(right) == 1
    site.add_backend("wrong", provider=TOY.replace(right, "np.exp(-x)) + (x.shape == (16, 64)))  # no probe's\n"))
    found = lz(site, "selftest", "wrong", "alpha")
    assert found.returncode == FAILED
    assert "wrong.silu: " in found.stdout
    assert "from the reference; allowed: 1e-05" in found.stdout
    assert "ok      alpha" in found.stdout


def test_a_backend_that_is_not_there(new_site: Callable[..., Site]) -> None:
    """Names that are known are in the error."""
    found = lz(new_site(), "selftest", "nobody")
    assert (found.returncode, "known: alpha" in found.stderr.replace("\n", "")) == (USAGE, True)
