"""C programs with liblayerzero as clients of real brokers and workers, under ASan and UBSan, leaks included."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.backends.toy import HANG, KILL, fault
from tests.c.conftest import LIBRARY, Built, libzmq, run
from tests.envs.harness import STORE
from tests.process.harness import PATIENCE_S, Site, wait_ended, wait_until

from layerzero.envs.build import build
from layerzero.ipc.vocabulary.ops import OPS


def called(built: Built, site: Site, mode: str, *more: object, **variables: str) -> str:
    """What the C program says in this mode."""
    return run(built["calls"], mode, site.folder, libzmq(), *more, **variables).stdout.decode()


@pytest.fixture(scope="module")
def torch_site() -> Iterator[Site]:
    """A broker whose backends are the project's own."""
    build.ensure(build.resolve("torch"), store=STORE)
    site = Site(STORE)
    del site.environ["LAYERZERO_MANIFEST_DIRS"]
    yield site.start()
    site.stop()


@pytest.fixture
def site(store: Path) -> Iterator[Site]:
    """A broker of a test's own."""
    site = Site(store, backoff_s=0.01, backoff_max_s=0.01)
    yield site
    site.stop()


def test_results_are_those_of_numpy(built: Built, torch_site: Site) -> None:
    """silu, matmul, rms_norm, and causal attention with grouped heads."""
    done = run(built["calls"], "ops", torch_site.folder, libzmq())
    values = iter(np.split(np.frombuffer(done.stdout, np.float32), np.cumsum(SIZES)[:-1]))
    x, out = next(values), next(values)
    assert np.allclose(out, x / (1 + np.exp(-x.astype(float))), atol=1e-6)
    a, b, out = (next(values).reshape(shape) for shape in ((8, 16), (16, 5), (8, 5)))
    assert np.allclose(out, a.astype(float) @ b, atol=1e-5)
    x, weight, out = next(values).reshape(4, 33), next(values), next(values).reshape(4, 33)
    assert np.allclose(out, x / np.sqrt((x.astype(float) ** 2).mean(-1, keepdims=True) + 1e-5) * weight, atol=1e-5)
    q, k, v, out = (next(values).reshape(2, heads, 6, 8).astype(float) for heads in (4, 2, 2, 4))
    k, v = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
    scores = np.where(np.tri(6, dtype=bool), 0.25 * q @ k.transpose(0, 1, 3, 2), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    assert np.allclose(out, weights / weights.sum(-1, keepdims=True) @ v, atol=1e-5)
    assert [line.split(" by ")[1].split(".")[0] for line in done.stderr.decode().splitlines()] == ["torch"] * 4


SIZES = [132, 132, 128, 80, 40, 132, 33, 132, 384, 192, 192, 384]


def test_a_worker_that_dies_in_a_call_costs_no_result(built: Built, broker: Site) -> None:
    """Another backend computes it; the report has the attempt, with its signal and what the worker did."""
    first, kernel, served = called(built, broker, "killed", fault(KILL, "alpha")).split()
    assert (first, kernel) == ("alpha", "alpha.silu")
    assert served in ("beta", "gamma")


def test_inputs_that_end_workers_are_recognised(built: Built, site: Site) -> None:
    """POISON, the digest that the broker asks for from then on, and other inputs that run."""
    site.start()
    called(built, site, "poisoned", fault(KILL))


def test_a_broker_that_dies_is_told_at_once(built: Built, site: Site) -> None:
    """In the middle of a call, whose worker hangs."""
    site.start()
    command = [built["calls"], "lost", site.folder, libzmq(), str(fault(HANG))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "calls\n"
        wait_until(site.worker_pids)
        pid = site.broker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
        said, errors = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 0, errors
    assert said.splitlines() == [
        "Start a broker with `lz up`, close this client and connect again.",
        f"The broker (pid {pid}) is gone",
    ]


def test_inputs_with_gaps_are_copied_where_the_kernel_wants_that(built: Built, site: Site) -> None:
    """ADAPTATION_REQUIRED is the library's to answer, and the report says what it cost."""
    site.add_backend("dense", priority=90, requires_contiguous=True)
    site.start()
    assert int(called(built, site, "strided")) == 60


def test_threads_share_a_client(built: Built, broker: Site) -> None:
    """Each call gets its own answer, whoever reads it."""
    called(built, broker, "threads")


def test_ops_write_into_the_callers_tensors(built: Built, broker: Site) -> None:
    """append_kv: the outputs are inputs, which overlap of no other op's may be."""
    called(built, broker, "in_place")


def test_any_number_of_signatures(built: Built, broker: Site) -> None:
    """The broker keeps 8192 for a client, the library 512, here 64: it forgets those that were used longest ago."""
    called(built, broker, "signatures")


def test_nothing_is_left_of_a_client(built: Built, broker: Site) -> None:
    """Descriptors, mappings and threads, after each of several connections."""
    called(built, broker, "leaves_nothing")


WRONG = {
    "no client": ("NOT_CONNECTED", "Connect first"),
    "no call": ("INVALID_ARGUMENT", "Set struct_size of lz_call_spec"),
    "no op": ("INVALID_ARGUMENT", "Name the op"),
    "unknown op": ("INVALID_ARGUMENT", "Correct the call"),
    "op not text": ("INVALID_ARGUMENT", "Name the op"),
    "unknown backend": ("INVALID_ARGUMENT", "Correct the call"),
    "time": ("INVALID_ARGUMENT", "Give timeout_s in seconds"),
    "too few inputs": ("INVALID_ARGUMENT", "Correct the call"),
    "too many inputs": ("INVALID_ARGUMENT", "Give a call at most 64 inputs"),
    "attribute of no type": ("INVALID_ARGUMENT", "Give attribute eps a type"),
    "attribute without text": ("INVALID_ARGUMENT", "Give attribute eps a text"),
    "attribute too many": ("INVALID_ARGUMENT", "Correct the call"),
    "size of tensor": ("INVALID_ARGUMENT", "Set struct_size of every lz_tensor"),
    "memory outside": ("INVALID_ARGUMENT", "Put input 0 into memory of lz_alloc"),
    "memory too short": ("INVALID_ARGUMENT", "Put input 0 into memory of lz_alloc"),
    "in place": ("INVALID_ARGUMENT", "Give output 0 memory of its own"),
    "overlap": ("INVALID_ARGUMENT", "Give output 0 memory of its own"),
    "too large": ("INVALID_ARGUMENT", "Make input 0 smaller"),
    "negative": ("INVALID_ARGUMENT", "Give input 0 extents"),
    "dimensions": ("INVALID_ARGUMENT", "Give input 0 at most 16 dimensions"),
    "dtype": ("INVALID_ARGUMENT", "Give input 0 a dtype"),
    "dtype of op": ("INVALID_ARGUMENT", "Correct the call"),
    "backend not built": ("NO_BACKEND", "Read the report's candidates"),
    "no output": ("INVALID_ARGUMENT", "Give every output a tensor"),
    "bytes": ("INVALID_ARGUMENT", "Ask for at most 2^46 bytes"),
    "memory": ("NO_MEMORY", "Free memory, or ask for less."),
    "free outside": ("INVALID_ARGUMENT", "Give back what lz_alloc"),
    "free inside": ("INVALID_ARGUMENT", "Give back what lz_alloc"),
    "free twice": ("INVALID_ARGUMENT", "Give back what lz_alloc"),
}


def test_wrong_arguments_say_what_to_do(built: Built, broker: Site) -> None:
    """In the first line, with the code in the struct as well; the client goes on."""
    said = [line.split("|") for line in called(built, broker, "wrong").splitlines()]
    assert {name: code for name, code, _, _ in said} == {name: code for name, (code, _) in WRONG.items()}
    assert [line for line in said if line[2] != "1" or not line[3].startswith(WRONG[line[0]][1])] == []


def test_no_broker_says_what_to_run(built: Built, store: Path) -> None:
    """None is started. A folder that is not there, one without a broker, and one that others may write to."""
    site = Site(store)
    code, advice, *_ = called(built, site, "unconnected").splitlines()
    assert code == "NOT_CONNECTED"
    assert "`lz up`" in advice
    site.folder.chmod(0o777)
    code, advice, *_ = called(built, site, "unconnected").splitlines()
    assert code == "CONFIG"
    assert "chmod 0700" in advice
    site.stop()
    code, advice, *_ = called(built, site, "unconnected").splitlines()
    assert code == "NOT_CONNECTED"
    assert "`lz up`" in advice


def test_both_prove_that_they_know_the_secret(built: Built, site: Site, tmp_path: Path) -> None:
    """With it calls run; without, or with another, each side says so."""
    right, other = tmp_path / "right", tmp_path / "other"
    for path, text in ((right, "r" * 40), (other, "o" * 20)):
        path.touch(0o600)
        path.write_text(f" {text}\n")
    site.environ["LAYERZERO_SECRET_FILE"] = str(right)
    site.start()
    called(built, site, "killed", fault(KILL, "alpha"), LAYERZERO_SECRET_FILE=str(right))
    assert called(built, site, "unconnected").startswith("NOT_ALLOWED\nName the stack's secret")
    refused = called(built, site, "unconnected", LAYERZERO_SECRET_FILE=str(other))
    assert refused.startswith("NOT_ALLOWED\n")
    other.chmod(0o644)
    assert "chmod 0600" in called(built, site, "unconnected", LAYERZERO_SECRET_FILE=str(other))


def test_a_broker_without_the_secret_is_refused(built: Built, broker: Site, tmp_path: Path) -> None:
    """Whoever has the secret talks to none that has not."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("s" * 40)
    said = called(built, broker, "unconnected", LAYERZERO_SECRET_FILE=str(secret))
    assert said.startswith("NOT_ALLOWED\nStart the broker with this stack's --secret-file")


def test_the_shared_library_exports_the_header_and_no_more(built: Built) -> None:
    """What is not in layerzero.h has no name outside."""
    names = run(Path("/usr/bin/env"), "nm", "-D", "--defined-only", built.shared_library()).stdout.decode()
    exported = {line.split()[2] for line in names.splitlines()}
    header = (LIBRARY / "layerzero.h").read_text(encoding="utf-8")
    assert exported == set(re.findall(r"^LZ_API [^;(]*?(\w+)\(", header, re.MULTILINE))


def test_ops_that_write_in_place_are_those_of_the_vocabulary() -> None:
    """The library refuses overlaps of all others."""
    source = (LIBRARY / "src" / "call.c").read_text(encoding="utf-8")
    table = re.findall(r'\{"(\w+)", (\d+), (\d+)\}', source[source.index("IN_PLACE[] =") :].split(";")[0])
    expected = [
        (op.name, str(op.outputs.index(name)), str(op.inputs.index(name)))
        for op in OPS.values()
        for name in op.in_place
    ]
    assert sorted(table) == sorted(expected)
