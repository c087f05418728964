"""The policy's key kernel_sources, and what the launcher makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import outside

from layerzero.broker.configuration import kernel_sources
from layerzero.broker.configuration.settings import Settings
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.selection.policy import Layer, Policy, compose
from layerzero.capabilities.reasons import Reason
from layerzero.envs.trust import allowed
from layerzero.envs.trust.bundle import Bundle, read_folder
from layerzero.ipc.errors import InvalidArgument

OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.delenv("LAYERZERO_KERNEL_SOURCES", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "policy.yaml").write_text("")
    return Settings(
        runtime_dir=tmp_path / "run",
        store=tmp_path / "store",
        backends_dir=tmp_path / "backends",
        policy=tmp_path / "policy.yaml",
    )


def bundle(tmp_path: Path) -> Bundle:
    return read_folder(tmp_path / "site" / "lz_theirs", "theirs", "test")


def test_file_goes_before_the_record_and_a_variable_before_both(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for every key; entry by entry, so that a file that pins one leaves the others."""
    outside.install(tmp_path / "site", "theirs")
    allowed.allow(settings.backends_dir, bundle(tmp_path), keep=False)
    assert kernel_sources.allowed(settings)["theirs"].value == bundle(tmp_path).sha256
    (tmp_path / "policy.yaml").write_text(f"kernel_sources: {{other: '{OLD}'}}")
    assert {name: one.value for name, one in kernel_sources.allowed(settings).items()} == {
        "theirs": bundle(tmp_path).sha256,
        "other": OLD,
    }
    (tmp_path / "policy.yaml").write_text(f"kernel_sources: {{theirs: '{OLD}'}}")
    assert kernel_sources.allowed(settings)["theirs"].value == OLD
    monkeypatch.setenv("LAYERZERO_KERNEL_SOURCES", f"theirs={NEW}")
    assert kernel_sources.allowed(settings)["theirs"] == allowed.Allowed(NEW, "LAYERZERO_KERNEL_SOURCES")


@pytest.mark.parametrize("value", ["yes", "sha256:abc", OLD.upper(), ""])
def test_value_is_a_hash_or_refuse(value: str) -> None:
    """A short hash or a yes would allow what nobody has looked at."""
    policy, problems = compose([Layer("test", {"kernel_sources": {"theirs": value}})])
    assert policy is None
    assert "kernel_sources" in problems[0] or "theirs" in problems[0]


def test_call_cannot_allow_a_source() -> None:
    """A client would lift what the operator has set for all."""
    with pytest.raises(InvalidArgument, match="kernel_sources holds for the whole broker"):
        Policy.of().with_overlay({"layers": [{"origin": "call", "values": {"kernel_sources": {"theirs": OLD}}}]})


def test_refused_backend_is_a_candidate_with_its_reason_until_it_is_allowed(settings: Settings, tmp_path: Path) -> None:
    """explain lists it, and a reset after the repair finds it allowed."""
    outside.install(tmp_path / "site", "theirs")
    launcher = Launcher(settings)
    assert launcher.capabilities["theirs"].kernel_ids == ("theirs.silu",)
    rejection = launcher.unusable["theirs"]
    assert rejection.code is Reason.SOURCE_NOT_ALLOWED
    for fact in ("kernel_sources", bundle(tmp_path).sha256):
        assert fact in rejection.detail
    assert rejection.repair.startswith("lz env add theirs")
    allowed.allow(settings.backends_dir, bundle(tmp_path), keep=False)
    missing = launcher.missing("theirs")
    assert missing is not None
    assert missing.code is Reason.NOT_INSTALLED
    assert missing.repair == "lz env build theirs"


def test_sources_that_change_below_a_broker_start_no_worker(settings: Settings, tmp_path: Path) -> None:
    """Neither what was never allowed nor, under the old descriptor, what was allowed meanwhile."""
    folder = outside.install(tmp_path / "site", "theirs")
    allowed.allow(settings.backends_dir, bundle(tmp_path), keep=False)
    launcher = Launcher(settings)
    (folder / "provider.py").write_text("CHANGED = 1\n")
    missing = launcher.missing("theirs")
    assert missing is not None
    assert missing.code is Reason.SOURCE_CHANGED
    with pytest.raises(Exception, match="have changed"):
        launcher.launch("theirs")
    allowed.allow(settings.backends_dir, bundle(tmp_path), keep=False)
    missing = launcher.missing("theirs")
    assert missing is not None
    assert "have changed since the broker started, and are allowed" in missing.detail
    assert missing.repair == "lz down"


def test_policy_file_alone_may_allow(settings: Settings, tmp_path: Path) -> None:
    """A deployment is described by its files; nobody types commands there."""
    outside.install(tmp_path / "site", "theirs")
    (tmp_path / "policy.yaml").write_text(f"kernel_sources: {{theirs: '{bundle(tmp_path).sha256}'}}")
    assert Launcher(settings).unusable["theirs"].code is Reason.NOT_INSTALLED


def test_wrong_descriptor_disables_its_backend_alone(settings: Settings, tmp_path: Path) -> None:
    """Kernel ids of ours cannot be taken, and the reason is told."""
    theirs = outside.descriptor("theirs")
    theirs["ops"]["silu"][0]["kernel_id"] = "torch.silu"
    outside.install(tmp_path / "site", "theirs", descriptor=json.dumps(theirs))
    launcher = Launcher(settings)
    assert "theirs" not in launcher.capabilities
    assert "torch.silu" in launcher.capabilities["torch"].kernel_ids
    assert ["'torch.silu' must begin with 'theirs.'" in problem for problem in launcher.problems] == [True]


def test_joined_backend_that_is_not_allowed_is_a_problem(settings: Settings, tmp_path: Path) -> None:
    """Its worker is turned away; whoever set `joined` must be told why."""
    outside.install(tmp_path / "site", "theirs")
    launcher = Launcher(settings.model_copy(update={"joined": "theirs"}))
    assert launcher.joined == frozenset()
    [problem] = launcher.problems
    assert problem.startswith("joined: theirs cannot join: kernel_sources does not list backend 'theirs'")
    assert problem.endswith("repair: lz env add theirs, then lz down")
