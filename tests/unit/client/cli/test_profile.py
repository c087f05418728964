"""`lz profile`: what was called becomes a profile, without a broker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from layerzero.broker.storage.perf_rows import Identity, Measurement
from layerzero.broker.storage.perf_store import Store
from layerzero.client.cli.profile import profile_app
from layerzero.ipc.errors import ConfigError

KEYS = ("silu x:float32[8]", "silu x:bfloat16[8]/rows", "embedding ids:int64[4] weight:float16[8x4]", "null")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with times of these calls."""
    monkeypatch.setenv("LAYERZERO_STORE", str(tmp_path))
    monkeypatch.delenv("LAYERZERO_PERF_DB", raising=False)
    times, _ = Store.open(tmp_path / "perf.db")
    identity = Identity(device_uuid="cpu-1")
    rows = [Measurement("a.k", key, identity.hash, "a", 3, 1.0, 1.0, 0.0, 0.0, 1.0) for key in KEYS]
    times.save([identity], rows)
    times.close()
    return tmp_path


def run(*words: str) -> Any:
    found = CliRunner().invoke(profile_app, [*words, "--json"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_a_profile_is_learned_of_the_calls_that_were_timed(store: Path) -> None:
    """Ops and the dtypes of their data; it is kept, listed and shown beside LayerZero's own."""
    calls = {"embedding": ["float16"], "silu": ["bfloat16", "float32"]}
    learned = run("learn", "mine")
    assert (learned["calls"], learned["file"]) == (calls, str(store / "profiles" / "mine.json"))
    assert run("list")["profiles"].keys() == {"inference", "quantized", "nlp", "all", "mine"}
    assert run("show", "mine")["calls"] == calls


def test_of_no_calls_no_profile_is_learned(store: Path) -> None:
    """It would refuse everything."""
    (store / "perf.db").unlink()
    with pytest.raises(ConfigError, match="no calls are known"):
        run("learn", "mine")
