"""Which imported calls clients may launch, and what is tried before: proofs are fakes, all else is the broker's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.simulation import DEVICES, GPU, GPU_CAPABILITIES
from tests.unit.broker.driver import CLIENT
from tests.unit.broker.lifting.test_lifts import CODE, LIFTED, TRIALS, Rig

from layerzero.broker.core import events as ev
from layerzero.broker.lifting.lifts import Lifts
from layerzero.broker.processes.imported import ImportedBackend
from layerzero.broker.selection.policy import Policy
from layerzero.broker.storage.perf_rows import Identity
from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.match import Rejection
from layerzero.capabilities.reasons import Reason
from layerzero.envs.lifted import folder as folders
from layerzero.envs.lifted.contents import ExportedBackend, ExportedCall
from layerzero.envs.lifted.imports import Imports
from layerzero.ipc.lifting.form import Lifted, digest
from layerzero.ipc.lifting.proof import Verdict
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.ipc.lifting.specimen import Specimen
from layerzero.ipc.vocabulary.tensors import TensorSpec

ALPHA = GPU_CAPABILITIES["alpha"]
IDENTITY = Identity(backend_version=ALPHA.backend_version, capabilities_hash=ALPHA.hash, env_hash="alpha")
OTHER = TensorSpec.contiguous("float32", (5,))
NEIGHBOUR = Lifted("silu", "alpha.silu", (OTHER,), (OTHER,), {}, (16, 16), (), LIFTED.steps)


class ImportRig(Rig):
    """As Rig, on a machine where alpha is imported: calls of LIFTED, with `trials`, and of a neighbour."""

    def __init__(self, top: Path, trials: Any = TRIALS) -> None:
        super().__init__(top / "lifted")
        made_of = {name: value for name, value in asdict(IDENTITY).items() if name != "device_uuid"}
        what = {"kernel": "alpha.silu", "backend": "alpha", "gpu": DEVICES[GPU].device_name, **made_of}
        calls = [ExportedCall(LIFTED, what, trials), ExportedCall(NEIGHBOUR, what, TRIALS)]
        record = ProbeRecord("alpha", "k", True, 0.1, {}, {}, {})
        parts = {"backends/alpha.json": ExportedBackend(ALPHA, "alpha", record).pack(), f"code/{digest(CODE)}": CODE}
        parts |= {f"calls/{call.key}": call.pack() for call in calls}
        folders.write(top / "folder", iter(parts.items()), None)
        self.imports = Imports(top / "store")
        source = self.imports.install(folders.open_folder(top / "folder", top, allows_unsigned=True), "a")
        backend = ImportedBackend(source, source.backend("alpha"), tuple(source.calls_of("alpha")))
        self.state.lifecycle.set_unavailable("alpha", backend.rejection())
        old = self.lifts
        identities = {"alpha": IDENTITY, "beta": Identity(env_hash="beta")}
        links, pages = old._links, old._pages
        self.lifts = Lifts(
            self.state, identities, links, pages, self.store, lambda: None, self.driver, imported={"alpha": backend}
        )
        self.lifts._proofs = self.proofs  # type: ignore[assignment]

    def number(self) -> int:
        """Of the one proof that goes on."""
        (number,) = self.proofs.asked
        return number


@pytest.fixture
def rig(tmp_path: Path) -> ImportRig:
    return ImportRig(tmp_path)


def test_an_imported_call_is_tried_and_then_granted(rig: ImportRig) -> None:
    assert rig.ask() == {"state": "pending"}
    assert rig.ask() == {"state": "pending"}
    assert rig.told == []  # no worker is asked
    tried = Specimen.unpack(rig.proofs.asked[rig.number()])
    assert (tried.lifted, tried.trials) == (LIFTED, TRIALS)
    rig.prove(rig.number())
    answer = rig.ask()
    assert (answer["state"], answer["digest"]) == ("ready", digest(LIFTED.pack()))


def test_who_asks_waits_only_where_no_worker_can_serve(rig: ImportRig) -> None:
    assert "alone" not in rig.ask()
    rig.state.lifecycle.set_unavailable("beta", Rejection(Reason.BACKEND_RESTARTING, "soon"))
    assert "alone" not in rig.ask()
    rig.state.lifecycle.set_unavailable("beta", Rejection(Reason.NOT_INSTALLED, "not built"))
    assert rig.ask() == {"state": "pending", "alone": True}


def test_a_neighbour_is_tried_for_a_call_without_trials(tmp_path: Path) -> None:
    rig = ImportRig(tmp_path, trials={})
    assert rig.ask() == {"state": "pending"}
    assert Specimen.unpack(rig.proofs.asked[rig.number()]).lifted == NEIGHBOUR
    rig.prove(rig.number())
    assert rig.ask()["digest"] == digest(LIFTED.pack())


def test_what_was_refused_here_is_for_the_next_kernel(rig: ImportRig) -> None:
    rig.ask()
    rig.prove(rig.number(), Verdict(LiftReason.PROOF_DIFFERS, "out is not what the library gave"))
    assert rig.ask()["state"] == "later"  # beta's worker has not served it yet
    spec = rig.state.clients[CLIENT].routes[2].signature.spec
    reason = rig.lifts._imports.rejection("alpha.silu", "alpha", spec)
    assert reason is not None
    assert "refused here: PROOF_DIFFERS" in reason.detail


@pytest.mark.parametrize("whose", ["alpha", "alpha.silu"])
def test_policy_keeps_a_backend_or_one_kernel_out(rig: ImportRig, whose: str) -> None:
    rig.driver(ev.PolicyChanged(Policy(backend_isolation={"*": "lifted", whose: "subprocess"})))
    spec = rig.state.clients[CLIENT].routes[2].signature.spec
    reason = rig.lifts._imports.rejection("alpha.silu", "alpha", spec)
    assert reason is not None
    assert f"backend_isolation is subprocess for {whose}" in reason.detail
    assert rig.lifts._imports.rejection("alpha.gelu", "alpha", spec) != reason


def test_smaller_alignments_are_for_the_next_kernel(rig: ImportRig) -> None:
    assert rig.ask(alignments=[8, 16])["state"] == "later"
    assert rig.proofs.asked == {}
    assert rig.ask(alignments=[256, 16]) == {"state": "pending"}  # more than is needed does no harm


def test_files_that_do_not_hold_are_not_tried(rig: ImportRig) -> None:
    for path in (rig.imports.folder / "data").glob("*/code/*"):
        path.write_bytes(b"other")
    assert rig.ask()["reason"] == "IMPORT_DAMAGED"
    assert rig.proofs.asked == {}
    assert rig.ask()["state"] == "later"


def test_what_a_worker_had_lifted_is_not_taken_for_an_import(rig: ImportRig) -> None:
    """Nor the other way round: each is tried for itself."""
    rig.ask()
    rig.prove(rig.number())
    assert rig.ask()["state"] == "ready"
    rig.state.lifecycle.set_unavailable("alpha", None)  # its environment was built
    assert rig.ask()["state"] != "ready"
