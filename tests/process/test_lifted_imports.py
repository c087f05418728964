"""Lifted calls that were exported on one machine and serve another, which has none of their library. Over the GPU of
threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process.gpu_site import close, randn, report, silu, slow, soft
from tests.process.harness import Site, wait_until
from tests.process.import_site import Exported, Importers, done, exported, importer, run, take
from tests.process.lifted_site import LiftedSites, kernels, lift, lifted_site, lifted_store, rows
from tests.process.test_cli import DONE, FAILED, data
from tests.process.test_cli import lz as lz_command
from tests.process.test_lifted_deaths import client
from tests.soft_gpu.soft_kernels import STRIKING

import layerzero as lz
from layerzero.broker.lifting.store import LiftStore
from layerzero.client.gpu.lifting import loaded
from layerzero.envs import signing
from layerzero.envs.lifted import folder as folders
from layerzero.envs.lifted.contents import ExportedCall
from layerzero.ipc.lifting.form import Lifted
from layerzero.ipc.lifting.results import Trials
from layerzero.ipc.lifting.specimen import SEEDS

__all__ = ["exported", "importer", "kernels", "lifted_site", "lifted_store", "soft"]


def why_not(call: Any, kernel_id: str = "one.silu") -> str:
    """What lz.explain says of the kernel for a call, which must refuse it."""
    found = next(c for c in call().candidates if c.kernel_id == kernel_id)
    assert not found.accepted
    return "; ".join(map(str, found.reasons))


def test_a_machine_without_the_library_serves_what_was_exported(exported: Exported, importer: Importers) -> None:
    """From the first call on, and no worker runs; in the next broker without another proof."""
    site = importer()
    shown = take(site, exported)
    assert (shown.returncode, "2 lifted calls of one, signed by ci" in shown.stdout) == (DONE, True), shown.stderr
    site.connect()
    x, values = randn(32, 32)
    for _ in range(3):
        close(lz.silu(x), silu(values))
        assert (report().path, report().backend) == ("lifted", "one")
    row = site.backend("one")
    assert (row["state"], row["pid"], row["unavailable"]["code"]) == ("absent", None, "LIFTED_ONLY")
    assert row["imported"] == {"import": "exported", "signer": "ci", "calls": 2}
    assert rows() == [("one.silu", "lifted", "")]
    assert len(site.events("lifted.proved")) == 1
    lz.disconnect()
    loaded.forget()
    assert lz_command(site, "down").returncode == DONE
    site.connect()
    close(lz.silu(x), silu(values))
    assert report().path == "lifted"
    assert len(site.events("lifted.proved")) == 1


def test_other_calls_are_refused_and_say_why(exported: Exported, importer: Importers) -> None:
    site = importer()
    take(site, exported)
    session = site.connect()
    x, values = randn(32, 32)
    y, _ = randn(33, 32)
    with pytest.raises(lz.NoBackend, match=r"one\.silu: LIFTED_ONLY: imported, 2 lifted calls "):
        lz.silu(y)
    with pytest.raises(lz.NoBackend, match="LIFTED_ONLY"):
        slow(x)
    with pytest.raises(lz.NoBackend, match="LIFTED_ONLY"):
        lz.silu(x, timeout_s=5.0)
    close(lz.silu(x), silu(values))
    whole, some = randn(501)
    close(lz.silu(whole[:500]), silu(some[:500]))
    with pytest.raises(lz.NoBackend, match="LIFTED_ONLY"):
        lz.silu(whole[1:])  # aligned to less than the kernel was captured for
    told = lz.explain("silu", x)
    (one,) = [c for c in told.candidates if c.kernel_id == "one.silu"]
    assert (told.kernel_id, one.accepted, one.lifted_only) == ("one.silu", True, True)
    assert "this call is none of them" in why_not(lambda: lz.explain("silu", y))
    shown = lz_command(site, "status")
    assert "imported" in shown.stdout
    assert "one: 2 lifted calls" in shown.stdout
    assert lz_command(site, "status", "-b", "one").returncode == DONE
    listed = lz_command(site, "env", "list", "--json")
    assert ("one", "imported", 2) in [(r["name"], r["state"], r.get("imported")) for r in data(listed)["environments"]]
    checks = {check["name"]: check for check in session.ask("readiness", backends=["one"])["checks"]}
    assert checks["environment one"]["ok"]
    assert checks["environment one"]["detail"].startswith("imported, 2 lifted calls")


def test_the_next_kernel_serves_what_was_not_imported(exported: Exported, importer: Importers) -> None:
    site = importer("two")
    take(site, exported)
    site.connect()
    (x, values), (y, others) = randn(32, 32), randn(33, 32)
    close(lift(lambda: lz.silu(x)), silu(values))
    for _ in range(4):
        close(lz.silu(y), silu(others))
        assert report().backend == "two"
    reasons = {c.kernel_id: [reason.code for reason in c.reasons] for c in report().candidates}
    assert reasons["one.silu"] == ["LIFTED_ONLY"]


def test_a_policy_that_changes_costs_no_call_an_error(exported: Exported, importer: Importers) -> None:
    """Leave ends, and is asked for again while the call waits."""
    site = importer()
    take(site, exported)
    site.connect()
    x, values = randn(32, 32)
    close(lz.silu(x), silu(values))
    for text in ("strict_mode: true\n", ""):
        before = lz.status()["selection"]["policy"]
        site.set_policy(text)

        def has_changed(before: str = before) -> bool:
            close(lz.silu(x), silu(values))
            assert report().path == "lifted"
            return bool(lz.status()["selection"]["policy"] != before)

        wait_until(has_changed)
        for _ in range(3):
            has_changed()


def test_policy_may_keep_it_out(exported: Exported, importer: Importers) -> None:
    site = importer(isolation="subprocess")
    take(site, exported)
    site.connect()
    x, _ = randn(32, 32)
    with pytest.raises(lz.NoBackend, match="LIFTED_ONLY"):
        lz.silu(x)
    assert "policy: backend_isolation is subprocess for one" in why_not(lambda: lz.explain("silu", x))


@pytest.mark.parametrize(
    ("other", "said"),
    [({"LZ_SOFT_DRIVER": "580.1"}, "driver 580.1"), ({"LZ_SOFT_GPU": "another kind"}, "GPU another kind")],
)
def test_another_machine_serves_none_of_it(
    exported: Exported, importer: Importers, other: dict[str, str], said: str
) -> None:
    site = importer(environ=other)
    take(site, exported)
    site.connect()
    x, _ = randn(32, 32)
    with pytest.raises(lz.NoBackend, match=r"LIFTED_ELSEWHERE: .* of another machine"):
        lz.silu(x)
    assert said in why_not(lambda: lz.explain("silu", x))
    assert site.backend("one")["unavailable"]["code"] == "LIFTED_ELSEWHERE"


def zeros(lifted: Lifted) -> Trials:
    """As numbers, where digests belong."""
    return dict.fromkeys(SEEDS, tuple(bytes(out.span_bytes) for out in lifted.outputs))


def signed_again(exported: Exported, to: Path, trials: Callable[[Lifted], Trials]) -> Exported:
    """The folder with other trials of each call."""
    parts: dict[str, bytes] = {}
    for path in sorted(exported.folder.glob("*/*")):
        name = path.relative_to(exported.folder).as_posix()
        parts[name] = path.read_bytes()
        if name.startswith("calls/"):
            call = ExportedCall.unpack(parts[name], path.name)
            parts[name] = ExportedCall(call.lifted, call.what, trials(call.lifted)).pack()
    folders.write(to, iter(parts.items()), signing.read_private(exported.key))
    return exported._replace(folder=to)


def test_what_does_not_work_here_is_not_used(exported: Exported, importer: Importers, tmp_path: Path) -> None:
    """Whoever signed it. Another import of that name is tried anew."""
    site = importer()
    wrong = signed_again(exported, tmp_path / "wrong", trials=lambda _: dict.fromkeys(SEEDS, ("00",)))
    assert take(site, wrong, "--name", "a").returncode == DONE
    site.connect()
    x, values = randn(32, 32)
    for _ in range(2):
        with pytest.raises(lz.NoBackend, match="LIFTED_ONLY"):
            lz.silu(x)
    assert "was refused here: PROOF_DIFFERS" in why_not(lambda: lz.explain("silu", x))
    lz.disconnect()
    assert take(site, exported, "--name", "a").returncode == DONE
    assert lz_command(site, "down").returncode == DONE
    site.connect()
    close(lz.silu(x), silu(values))
    assert report().path == "lifted"


def test_what_is_refused_leaves_nothing(exported: Exported, importer: Importers, tmp_path: Path) -> None:
    site = importer()
    shown = run(site, "import", str(exported.folder))
    assert (shown.returncode, shown.stdout) == (FAILED, "")
    assert "trust its key if it is to be trusted" in shown.stderr.splitlines()[0]
    harmed = signed_again(exported, tmp_path / "harmed", trials=lambda _: dict.fromkeys(SEEDS, ("aa",)))
    (code,) = (harmed.folder / "code").iterdir()
    code.write_bytes(b"soft:")
    shown = take(site, harmed)
    assert (shown.returncode, shown.stdout) == (FAILED, "")
    assert "export it again" in shown.stderr.splitlines()[0]
    loose = signed_again(exported, tmp_path / "loose", trials=zeros)
    shown = take(site, loose)
    assert (shown.returncode, shown.stdout) == (FAILED, "")
    assert "repeats its bytes, and has numbers to compare" in shown.stderr
    assert data(run(site, "list", "--json"))["imports"] == []
    (harmed.folder / folders.SIGNATURE).unlink()
    assert run(site, "import", str(harmed.folder)).returncode == FAILED
    assert run(site, "import", str(harmed.folder), "--allow-unsigned").returncode == FAILED
    site.connect()
    assert "one" not in [row["name"] for row in lz.status()["backends"]]


def test_an_import_is_removed(exported: Exported, importer: Importers) -> None:
    site = importer()
    take(site, exported, "--name", "a")
    (row,) = data(run(site, "list", "--json"))["imports"]
    assert (row["name"], row["signer"], row["backends"]) == ("a", "ci", {"one": 2})
    assert "a: 2 lifted calls of one, signed by ci" in done(site, "list").stdout
    assert done(site, "remove", "a").stdout.startswith("removed a")
    assert run(site, "remove", "a").returncode == FAILED
    assert done(site, "distrust", "ci").stdout == "ci is trusted no more\n"
    assert "nothing was imported" in done(site, "list").stdout
    site.connect()
    assert "one" not in [row["name"] for row in lz.status()["backends"]]


def test_an_imported_kernel_that_costs_a_client_its_gpu_is_quarantined(exported: Exported, importer: Importers) -> None:
    """In the next broker, too, until it is forgiven."""
    site: Site = importer()
    take(site, exported)
    site.start()
    code = f"""
lift(lambda: lz.silu(x))
x.fill({STRIKING})
try:
    while True: lz.silu(x)
except lz.LayerZeroError as exc:
    print(exc.code, lz.last_report().path, flush=True)
"""
    other = client(site, code, 500)
    assert other.stdout is not None
    assert other.communicate()[0].split() == ["BACKEND_ERROR", "lifted"]
    wait_until(lambda: site.events("lifted.faulted"))
    x, values = randn(32, 32)
    for _ in range(2):
        site.connect()
        with pytest.raises(lz.NoBackend, match="LIFTED_ONLY"):
            lz.silu(x)
        assert "lost its GPU; lz cache forgive" in why_not(lambda: lz.explain("silu", x))
        lz.disconnect()
        assert lz_command(site, "down").returncode == DONE
    assert lz_command(site, "cache", "forgive").stdout == "forgiven: 1\n"
    site.connect()
    close(lz.silu(x), silu(values))
    assert report().path == "lifted"


def test_kernels_at_fault_and_what_was_imported_are_not_exported(
    lifted_site: LiftedSites, lifted_store: Path, tmp_path: Path
) -> None:
    site = lifted_site()
    site.connect()
    x, _ = randn(32, 32)
    lift(lambda: lz.silu(x))
    lift(lambda: lz.matmul(x, x))
    lz.disconnect()
    store = LiftStore(lifted_store / "lifted")
    (what,) = [entry.what for _, entry in store.entries() if entry.kernel_id == "one.silu"]
    store.note_fault(what, "it was at fault")
    told = data(run(site, "export", str(tmp_path / "some"), "--unsigned", "--json"))
    assert (told["calls"], told["signer"]) == (1, None)
    assert told["left_out"] == {"are of kernels that a process lost its GPU with": 1}
    shown = run(site, "export", str(tmp_path / "none"), "--unsigned", "--kernel", "one.silu")
    assert (shown.returncode, (tmp_path / "none").exists()) == (FAILED, False)
    assert "there is nothing to export" in shown.stderr
    assert run(site, "export", str(tmp_path / "none"), "--unsigned", "--backend", "nobody").returncode == FAILED
    assert run(site, "export", str(tmp_path / "none")).returncode == 2
