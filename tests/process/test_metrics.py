"""Metrics as Prometheus reads them: by HTTP and by unix socket, and who may not."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.backends.toy import KILL
from tests.process.harness import Site, is_running, wait_ended, wait_until
from tests.process.test_counters import counts
from tests.process.test_express import X, bad, settle

import layerzero as lz
from layerzero.broker.configuration.settings import Settings
from layerzero.broker.processes.exporter import Exporter
from layerzero.ipc.errors import ConfigError, LayerZeroError
from layerzero.ipc.transport.endpoints import Endpoints

TOKEN = "0123456789abcdef0123"
Make = Callable[..., Site]


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(60)
        self.sock.connect(str(self.path))


def get(where: Path | int, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    made = _Unix(where) if isinstance(where, Path) else http.client.HTTPConnection("127.0.0.1", where, timeout=60)
    try:
        made.request("GET", path, headers=headers)
        answer = made.getresponse()
        return answer.status, answer.read().decode()
    finally:
        made.close()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """By name and values of labels; buckets left out."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def shown(new_site: Make, **settings: object) -> tuple[Site, Path]:
    """A broker that shows metrics on a socket in its folder."""
    site = new_site(**settings)
    where = site.folder / "metrics.sock"
    site.environ["LAYERZERO_METRICS"] = f"unix:{where}"
    site.start().connect()
    return site, where


def test_what_is_counted_is_shown(new_site: Make) -> None:
    """Calls on lanes, a worker that died, states of workers; each name once, as a parser reads it."""
    site, where = shown(new_site)
    assert where.stat().st_mode & 0o777 == 0o600
    site.wait_ready("alpha", "beta")
    settle()
    for _ in range(20):
        lz.silu(X)
    lz.silu(bad(KILL, "alpha"))
    status, text = get(where)
    assert status == 200
    found, told = samples(text), counts()
    for (op, backend, path), count in told.items():
        assert found["layerzero_call_duration_seconds_count", backend, op, path] == count
        assert found["layerzero_call_duration_seconds_sum", backend, op, path] > 0
    silu = sum(count for (op, backend, _), count in told.items() if (op, backend) == ("silu", "alpha"))
    assert found["layerzero_calls_total", "alpha", "silu", "ok"] == silu
    assert found["layerzero_fallbacks_total", "alpha", "silu", "BACKEND_ERROR"] == 1
    assert found["layerzero_worker_restarts_total", "alpha", "crash"] == 1
    assert found["layerzero_worker_state", "beta", "ready"] == 1
    assert found["layerzero_copied_bytes_total", "silu", "express"] > 0
    assert found["layerzero_clients",] == 1
    assert found["layerzero_info", str(lz.__version__)] == 1
    buckets = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "layerzero_call_duration_seconds_bucket" and sample.labels["path"] == "express"
    ]
    assert [sample.labels["le"] for sample in buckets[:3]] == ["1e-06", "2e-06", "4e-06"]
    assert [sample.value for sample in buckets] == sorted(sample.value for sample in buckets)
    assert get(where, "/nothing")[0] == 404


def test_over_tcp_a_token_is_asked_for_where_there_is_one(new_site: Make, tmp_path: Path) -> None:
    """Health is told to anybody, in a word."""
    file, port = tmp_path / "token", free_port()
    file.write_text(TOKEN)
    file.chmod(0o600)
    site = new_site(metrics=f"127.0.0.1:{port}", metrics_token_file=file)
    site.start().connect()
    for headers in ({}, {"Authorization": "Bearer " + TOKEN[:-1]}, {"Authorization": f"Basic {TOKEN}"}):
        status, text = get(port, **headers)
        assert (status, "layerzero_" in text) == (401, False)
    assert get(port, Authorization=f"Bearer {TOKEN}")[0] == 200
    assert get(port, "/healthz") == (200, "ok\n")
    assert get(port, "/readyz") == (200, "ok\n")


def test_health_is_true_within_a_second(new_site: Make) -> None:
    """A broker that stands still is not well; one with a policy that is not in force is not ready."""
    site, where = shown(new_site)
    assert get(where, "/healthz") == (200, "ok\n")
    assert get(where, "/readyz") == (200, "ok\n")
    pid = site.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        status, why = get(where, "/healthz")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (status, "does not answer within 1 s" in why) == (503, True)
    wait_until(lambda: get(where, "/healthz")[0] == 200)
    site.set_policy("nonsense: 1\n")
    wait_until(lambda: get(where, "/readyz")[0] == 503)
    assert "policy" in get(where, "/readyz")[1]
    assert get(where, "/healthz")[0] == 200
    site.set_policy()
    wait_until(lambda: get(where, "/readyz")[0] == 200)


def test_the_exporter_ends_with_its_broker_and_starts_again_when_it_dies(new_site: Make) -> None:
    """Its socket is the broker's: whoever asks meanwhile waits."""
    site, where = shown(new_site)
    [started] = site.events("metrics.started")
    os.kill(started["pid"], signal.SIGKILL)
    assert get(where)[0] == 200
    pid = site.events("metrics.started")[-1]["pid"]
    assert pid != started["pid"]
    broker = site.broker_pid
    assert broker is not None
    os.kill(broker, signal.SIGKILL)
    wait_ended(broker)
    wait_until(lambda: not is_running(pid))
    where.unlink()


def test_scrapes_do_not_keep_an_idle_broker(new_site: Make) -> None:
    """Nor do they count as clients."""
    site = new_site(linger_s=0.2)
    where = site.folder / "metrics.sock"
    site.environ["LAYERZERO_METRICS"] = f"unix:{where}"
    site.connect()
    assert samples(get(where)[1])["layerzero_clients",] == 1
    lz.disconnect()
    wait_until(lambda: site.broker_pid is None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("127.0.0.1", "allowed: ADDRESS:PORT"),
        ("127.0.0.1:0", "allowed: ADDRESS:PORT"),
        ("0.0.0.0:9464", "lz keys secret"),
        ("[::]:9464", "lz keys secret"),
        ("unix:/nowhere/at/all", "name another path"),
        ("example.org:1", "allowed: ADDRESS:PORT"),
    ],
)
def test_an_address_that_will_not_do_is_told(given: str, words: str, tmp_path: Path) -> None:
    """At once, with what to do; nobody else may read without a token."""
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        Exporter(Settings(metrics=given), Endpoints(tmp_path))


def test_lz_up_takes_the_address(new_site: Make) -> None:
    """A broker that runs already shows its metrics where it was told to, or nowhere."""
    site, port = new_site(), free_port()
    up = ["-m", "layerzero", "up", "--metrics"]
    with site.environment():
        command = [__import__("sys").executable, "-m", "layerzero.client.cli.app", *up[2:]]
        subprocess.run([*command, f"127.0.0.1:{port}"], check=True, capture_output=True)
        assert get(port, "/healthz")[0] == 200
        subprocess.run([*command, f"127.0.0.1:{port}"], check=True, capture_output=True)
        other = subprocess.run([*command, "127.0.0.1:1"], check=False, capture_output=True, text=True)
    assert other.returncode != 0
    assert "lz down" in other.stderr


def test_a_stuck_question_does_not_stop_the_next(new_site: Make) -> None:
    """One is asked for all who wait."""
    from layerzero.client.metrics.serving import Broker

    asked: list[str] = []

    def ask(question: str) -> dict[str, object]:
        asked.append(question)
        raise LayerZeroError("no")

    broker = Broker(ask)
    with pytest.raises(LayerZeroError):
        broker.answer("metrics", 5.0)
    with pytest.raises(LayerZeroError):
        broker.answer("metrics", 5.0)
    assert asked == ["metrics", "metrics"]
