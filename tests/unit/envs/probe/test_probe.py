"""Probing: however the probe's process ends, there is a verdict, and it holds for exactly what was probed."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from layerzero.envs.build.env import Env
from layerzero.envs.manifest import EnvManifest, Source, load
from layerzero.envs.probe import probe as envs_probe
from layerzero.envs.probe.child import Ended
from layerzero.envs.probe.probe import _repair, cached_probe, judge, probe, probe_cached, probe_key

FAILURE = {
    "kernel_id": "k",
    "dtype": "float32",
    "shape_class": "plain/long/dense",
    "case": "[300]",
    "detail": "error 1",
}
NOTHING: dict[str, Any] = {"versions": {}, "kernels": {}, "certified": {}, "failures": []}
ANSWER = json.dumps(
    {
        "ok": True,
        "versions": {"lib": "1"},
        "kernels": {"k": {"failed": 1}},
        "certified": {"k": {"float32": {"empty": 0, "plain/small/dense": 1e-7}}},
        "failures": [FAILURE],
        "error": None,
    }
)
BAD_FAILURE = ANSWER.replace('"error 1"', "1")
BAD_VERSION = ANSWER.replace('{"lib": "1"}', '{"lib": ["1"]}')
FAILED = json.dumps(
    {**NOTHING, "ok": False, "error": {"kind": "import", "message": "no x", "missing": "x", "traceback": "tb"}}
)


@pytest.fixture
def manifest(tmp_path: Path) -> EnvManifest:
    (tmp_path / "p.py").write_text("")
    (tmp_path / "d.json").write_text("{}")
    path = tmp_path / "fake.toml"
    path.write_text('summary = "s"\nprovider = "p.py"\ndescriptor = "d.json"\ninterpreter = "host"\n')
    return load(path)


def fake_env(folder: Path, code: str) -> Env:
    """An Env whose layerzero.workers.probe is `code`."""
    package = folder / "stage" / "layerzero" / "workers"
    package.mkdir(parents=True, exist_ok=True)
    for parent in (package.parent, package):
        (parent / "__init__.py").touch()
    (package / "probe.py").write_text(code)
    environ = {"PYTHONPATH": str(folder / "stage"), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
    python = Path(sys.executable)
    return Env("fake", "cpu", "0" * 16, python, python.parent.parent, environ, "lock", "source", folder)


def test_good_answer_is_ok_whatever_the_library_printed(tmp_path: Path, manifest: EnvManifest) -> None:
    """Libraries greet on stdout; only the last line is ours."""
    record = probe(fake_env(tmp_path, f"print('hello')\nprint('''{ANSWER}''')"), manifest)
    assert (record.ok, record.kind, record.repair, record.stderr_tail) == (True, "", "", "")
    assert (record.versions, record.kernels) == ({"lib": "1"}, {"k": {"failed": 1}})
    assert record.certified == {"k": {"float32": {"empty": 0, "plain/small/dense": 1e-7}}}
    assert [failure["shape_class"] for failure in record.failures] == ["plain/long/dense"]
    assert record.counts == (2, 1)


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (f"print('''{FAILED}'''); raise SystemExit(1)", "import", "no x"),
        ("import os, sys; sys.stderr.write('last words'); sys.stderr.flush(); os.kill(os.getpid(), 11)", "crash",
         "the probe's process died of SIGSEGV"),
        (f"print('''{ANSWER}''', flush=True)\nimport os; os.abort()", "crash", "the probe's process died of SIGABRT"),
        ("print('{}')", "protocol", "the probe ended with exit code 0 and no verdict: "),
        ("print('{\"ok\": true}')", "protocol", "the probe ended with exit code 0 and no verdict: "),
        (f"print('''{ANSWER.replace('1e-07', 'null')}''')", "protocol",
         "the probe ended with exit code 0 and no verdict: "),
        ("print('[' * 5000)", "protocol", "the probe ended with exit code 0 and no verdict: "),
        (f"print('''{BAD_VERSION}''')", "protocol",
         "the probe ended with exit code 0 and no verdict: "),
        (f"print('''{BAD_FAILURE}''')", "protocol",
         "the probe ended with exit code 0 and no verdict: "),
        ("raise ImportError('libx.so')", "protocol",
         "the probe ended with exit code 1 and no verdict: ImportError: libx.so"),
    ],
)  # fmt: skip
def test_every_failure_is_a_verdict_with_a_repair(
    tmp_path: Path, manifest: EnvManifest, code: str, kind: str, message: str
) -> None:
    """A backend that dies on import is a fact to report; it must not take the broker's start with it."""
    record = probe(fake_env(tmp_path, code), manifest)
    assert (record.ok, record.kind, record.message) == (False, kind, message)
    assert record.repair == "lz env build fake --force"
    if kind == "import":
        assert (record.missing, record.traceback) == ("x", "tb")


def test_repair_does_not_promise_that_building_mends_wrong_numbers(tmp_path: Path, manifest: EnvManifest) -> None:
    """The same wheels would give the same numbers; the user needs the details instead."""
    record = probe(fake_env(tmp_path, f"print('''{FAILED.replace('import', 'numeric')}''')"), manifest)
    assert (record.kind, record.repair) == ("numeric", "lz env probe fake --json")


AT_LOADING, IN_A_CASE = '{"at": []}', '{"at": ["k", "float32", "a case"]}'


@pytest.mark.parametrize(
    ("said", "where", "repair"),
    [
        (AT_LOADING, " while it loaded the provider", "lz env build fake --force"),
        (
            IN_A_CASE,
            " in k, float32, case 'a case'",
            "mend k in {folder}/p.py, or take it out of {folder}/d.json, then: ",
        ),
    ],
)
@pytest.mark.parametrize(
    ("code", "message"),
    [(None, "the probe did not get on within 3 s"), (-11, "the probe's process died of SIGSEGV")],
)
def test_a_probe_that_dies_or_hangs_says_where(
    tmp_path: Path, manifest: EnvManifest, said: str, where: str, repair: str, code: int | None, message: str
) -> None:
    """The signal does not say which of a hundred cases it was, and building again mends no kernel."""
    env = fake_env(tmp_path, "")
    record = judge(Ended(code, said.encode(), b""), "fake", "key", 1.0, 3.0, partial(_repair, env, manifest))
    assert record.message == message + where
    if code is not None or where.startswith(" in "):
        assert record.repair.startswith(repair.format(folder=manifest.path.parent))


def test_crash_keeps_the_last_words(tmp_path: Path, manifest: EnvManifest) -> None:
    """The signal alone does not say which library broke."""
    code = "import os, sys; sys.stderr.write('symbol lookup error: x'); sys.stderr.flush(); os.kill(os.getpid(), 11)"
    assert probe(fake_env(tmp_path, code), manifest).stderr_tail == "symbol lookup error: x"


def test_hang_is_killed_with_its_children(tmp_path: Path, manifest: EnvManifest) -> None:
    """A child that survived would hold the pipe open, and this test would hang."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    record = probe(fake_env(tmp_path, code), manifest, timeout_s=0.5)
    assert (record.kind, record.message) == ("timeout", "the probe did not get on within 0.5 s")
    assert record.seconds < 600


def test_a_slow_probe_that_gets_on_is_not_hung(tmp_path: Path, manifest: EnvManifest) -> None:
    """A busy machine makes a probe slow; its backend is none the worse for it."""
    code = """
        import json, os, sys, threading
        for case in range(8):
            os.pwrite(1, json.dumps({"at": ["k", "float32", str(case)]}).encode(), 0)
            threading.Event().wait(0.2)
        os.ftruncate(1, 0)
        sys.exit(3)
    """
    record = probe(fake_env(tmp_path, textwrap.dedent(code)), manifest, timeout_s=1.0)
    assert record.seconds > 1.6
    assert record.kind != "timeout"


def test_a_probe_that_gets_on_for_ever_is_ended(tmp_path: Path, manifest: EnvManifest) -> None:
    code = "import os, threading\nwhile True:\n    os.pwrite(1, b'x', 0)\n    threading.Event().wait(0.01)\n"
    record = probe(fake_env(tmp_path, code), manifest, timeout_s=0.2)
    assert record.kind == "timeout"
    assert record.seconds >= 2.0


def test_secrets_stay_outside(tmp_path: Path, manifest: EnvManifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel library has no business with the user's tokens."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    code = (
        "import json, os; print(json.dumps({'ok': True, 'kernels': {}, 'certified': {}, 'failures': [], "
        "'versions': {k: os.environ.get(k, '') for k in ('HF_TOKEN', 'OMP_NUM_THREADS')}}))"
    )
    record = probe(fake_env(tmp_path, code), manifest)
    assert record.versions == {"HF_TOKEN": "", "OMP_NUM_THREADS": "3"}


def test_verdict_is_kept_and_refreshed_on_demand(tmp_path: Path, manifest: EnvManifest) -> None:
    """Importing every library at each start would cost seconds; a repaired library must get another chance."""
    env = fake_env(tmp_path, "raise ImportError('broken')")
    assert cached_probe(env, manifest) is None
    first = probe_cached(env, manifest)
    assert not first.ok
    fake_env(tmp_path, f"print('''{ANSWER}''')")
    assert probe_cached(env, manifest) == first
    assert probe_cached(env, manifest, refresh=True).ok
    assert cached_probe(env, manifest) == probe_cached(env, manifest)


def test_verdict_on_files_that_have_changed_is_not_kept(
    tmp_path: Path, manifest: EnvManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key names the environment as it was built, which would be judged by it once it is repaired."""
    env = fake_env(tmp_path, f"print('''{ANSWER}''')")
    said = ["x.py has changed"]
    monkeypatch.setattr(Env, "on_host", property(lambda env: False))
    monkeypatch.setattr(envs_probe, "drift", lambda env, verify=False: said[0])
    monkeypatch.setattr(envs_probe.integrity, "changes", lambda prefix: [])
    monkeypatch.setattr(envs_probe.integrity, "owner", lambda *_: "")
    found = probe_cached(env, manifest)
    assert (found.ok, found.kind) == (False, "changed")
    said[0] = ""
    assert cached_probe(env, manifest) is None
    assert probe_cached(env, manifest).ok


def test_probe_that_took_too_long_is_tried_again(tmp_path: Path, manifest: EnvManifest) -> None:
    """The machine may have been busy: one slow start must not cost a backend for good."""
    env = fake_env(tmp_path, "import time; time.sleep(600)")
    assert probe_cached(env, manifest, timeout_s=0.1).kind == "timeout"
    kept = cached_probe(env, manifest)
    assert kept is not None  # for those who only look
    assert kept.kind == "timeout"
    fake_env(tmp_path, f"print('''{ANSWER}''')")
    assert probe_cached(env, manifest).ok


def test_key_covers_all_that_a_verdict_depends_on(
    tmp_path: Path, manifest: EnvManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict on other code or another descriptor says nothing."""
    env = fake_env(tmp_path, "")
    keys = [probe_key(env, manifest), probe_key(replace(env, id="1"), manifest)]
    keys.append(probe_key(replace(env, source_hash="x"), manifest))
    keys.append(probe_key(env, manifest.model_copy(update={"env": {"A": "1"}})))
    keys.append(probe_key(env, manifest.model_copy(update={"source": Source("a package", "sha256:1")})))
    with monkeypatch.context() as patch:
        patch.setattr(envs_probe, "_machine", lambda: ["another processor, or another driver"])
        keys.append(probe_key(env, manifest))
    (tmp_path / "p.py").write_text("changed")
    keys.append(probe_key(env, manifest))
    (tmp_path / "d.json").write_text("changed")
    keys.append(probe_key(env, manifest))
    assert len(set(keys)) == len(keys)


def test_damaged_record_is_no_record(tmp_path: Path, manifest: EnvManifest) -> None:
    """A cut-off file must lead to a probe and not to a traceback."""
    env = fake_env(tmp_path, f"print('''{ANSWER}''')")
    probe_cached(env, manifest)
    [path] = tmp_path.glob("probes/fake-*.json")
    path.write_text(path.read_text()[:20])
    assert cached_probe(env, manifest) is None
