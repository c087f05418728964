"""Real builds of a tiny environment, from the package index the user configured. Needs network."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.process import forks

from layerzero.envs.build.build import ensure, hold, plan
from layerzero.envs.build.installers import InstallerName, find_uv, pick
from layerzero.envs.build.lock import lock, read_lock
from layerzero.envs.build.progress import Lines
from layerzero.envs.build.several import ensure_all
from layerzero.envs.cli.rows import verdict
from layerzero.envs.manifest import EnvManifest, load
from layerzero.envs.transfer.gc import collect
from layerzero.ipc.errors import EnvError

SAMPLES = Path(__file__).parents[1] / "samples" / "manifests"
needs_uv = pytest.mark.skipif(find_uv() is None, reason="uv is not installed")

# A builder in its own process. It says "installing" and then does what argv[3] names.
BUILDER = """
import sys
from pathlib import Path
from layerzero.envs.build.build import ensure
from layerzero.envs.build.installers import pick
from layerzero.envs.manifest import load

class Watched:
    name = "pip"
    def __init__(self): self.real = pick()
    def create(self, folder, python, run): self.real.create(folder, python, run)
    def install(self, folder, lock, run):
        print("installing", flush=True)
        if sys.argv[3] == "hang":
            run([sys.executable, "-c", "import time; print('hanging', flush=True); time.sleep(600)"], {})
        self.real.install(folder, lock, run)

class Say:
    def started(self, env): pass
    def phase(self, env, text): print(text, flush=True)
    def done(self, env, seconds, nbytes): pass
    def failed(self, env, seconds, cause): pass

env = ensure(load(Path(sys.argv[1])), store=Path(sys.argv[2]), installer=Watched(), progress=Say())
print("built", env.id, flush=True)
"""


@pytest.fixture
def tiny() -> EnvManifest:
    return load(SAMPLES / "tiny.toml")


def builder(store: Path, action: str = "build") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(SAMPLES / "tiny.toml"), str(store), action],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    """Read what the builder says until it has said `word`."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if word in line:
            return
    raise AssertionError(f"never said {word!r}: {''.join(said)}")


def names(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "envs").iterdir())


@pytest.mark.parametrize("installer", [pytest.param("uv", marks=needs_uv), "pip"])
def test_build_has_exactly_the_locked_versions(tmp_path: Path, tiny: EnvManifest, installer: InstallerName) -> None:
    """Both installers must give the same environment, and what runs must be what was locked."""
    env = ensure(tiny, store=tmp_path, installer=pick(installer))
    code = (
        "import importlib.metadata as m, json, msgpack, zmq, layerzero.ipc.vocabulary.ops, sys;"
        "print(json.dumps([m.version('pyzmq'), m.version('msgpack'), sys.prefix]))"
    )
    ran = subprocess.run([env.python, "-c", code], env=dict(env.environ), cwd=tmp_path, capture_output=True, check=True)
    pins = read_lock(tiny, "cpu").pins
    assert json.loads(ran.stdout) == [pins["pyzmq"], pins["msgpack"], str(env.prefix)]
    record = env.record()
    assert (record["id"], record["versions"], record["installer"]) == (env.id, pins, installer)
    assert record["size_bytes"] > 1_000_000
    assert env.environ["TINY_SETTING"] == "on"
    assert names(tmp_path) == [".locks", env.prefix.name]


def test_second_ensure_builds_nothing(tmp_path: Path, tiny: EnvManifest) -> None:
    """The broker calls it at every start."""
    env = ensure(tiny, store=tmp_path)
    before = (env.prefix / "lz-env.json").stat()
    assert ensure(tiny, store=tmp_path) == env
    assert (env.prefix / "lz-env.json").stat() == before


def test_damaged_environment_is_built_again(tmp_path: Path, tiny: EnvManifest) -> None:
    """An upgrade of the system's Python leaves a venv whose interpreter dangles."""
    env = ensure(tiny, store=tmp_path)
    env.python.unlink()
    env.python.symlink_to("/nonexistent")
    assert ensure(tiny, store=tmp_path).is_built
    assert names(tmp_path) == [".locks", env.prefix.name]


def test_two_builders_of_one_environment_build_it_once(tmp_path: Path, tiny: EnvManifest) -> None:
    """Two brokers may start at once; the later one must wait and use what the first made."""
    first = builder(tmp_path)
    wait_for(first, "installing")  # it has the lock now, or is already done
    second = builder(tmp_path)
    said = [process.communicate()[0] for process in (first, second)]
    env = plan(tiny, store=tmp_path)
    assert [process.returncode for process in (first, second)] == [0, 0], said
    assert [text.splitlines()[-1] for text in said] == [f"built {env.id}"] * 2
    assert "installing" not in said[1]
    assert names(tmp_path) == [".locks", env.prefix.name]


def test_killed_build_leaves_no_environment_and_the_next_succeeds(tmp_path: Path, tiny: EnvManifest) -> None:
    """Power cuts, OOM killers and impatient users kill builds."""
    killed = builder(tmp_path, "hang")
    wait_for(killed, "hanging")
    assert len(list((tmp_path / "envs").glob(".building-tiny-*"))) == 1
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not plan(tiny, store=tmp_path).is_built
    env = ensure(tiny, store=tmp_path)
    assert names(tmp_path) == [".locks", env.prefix.name]


def test_interrupted_build_cleans_up_at_once(tmp_path: Path, tiny: EnvManifest) -> None:
    """Ctrl-C must end the installer too and give the disk space back."""
    interrupted = builder(tmp_path, "hang")
    wait_for(interrupted, "hanging")
    os.kill(interrupted.pid, signal.SIGINT)
    interrupted.communicate()
    assert names(tmp_path) == [".locks"]


def test_installer_that_outlives_its_builder_is_waited_for(tmp_path: Path, tiny: EnvManifest) -> None:
    """It still writes; removing its folder under it would mix two builds."""
    orphaned = builder(tmp_path, "hang")
    wait_for(orphaned, "hanging")
    os.kill(orphaned.pid, signal.SIGKILL)
    orphaned.wait()
    second = builder(tmp_path)
    wait_for(second, "waiting for another process")
    os.killpg(orphaned.pid, signal.SIGKILL)  # the tool it had started
    orphaned.communicate()
    said = second.communicate()[0]
    assert second.returncode == 0, said
    assert names(tmp_path) == [".locks", plan(tiny, store=tmp_path).prefix.name]


def third_party(folder: Path, lock_text: str, requirement: str = "layerzero-no-such-package==1.0") -> EnvManifest:
    folder.mkdir()
    (folder / "broken.toml").write_text(
        'summary = "s"\nprovider = "null"\ndescriptor = "null"\npython = "3.11"\n'
        f'[variants.cpu]\nrequirements = ["{requirement}"]\n'
    )
    (folder / "broken.cpu.txt").write_text(lock_text)
    return load(folder / "broken.toml")


@pytest.mark.parametrize("installer", [pytest.param("uv", marks=needs_uv), "pip"])
def test_failed_build_says_why_and_what_to_run(tmp_path: Path, tiny: EnvManifest, installer: InstallerName) -> None:
    """And leaves nothing behind, and does not stop the others."""
    text = read_lock(tiny, "cpu").text + f"layerzero-no-such-package==1.0 --hash=sha256:{'0' * 64}\n"
    broken = third_party(tmp_path / "manifests", text)
    results = ensure_all([broken, tiny], store=tmp_path, installer=pick(installer))
    error = results["broken"]
    assert isinstance(error, EnvError)
    assert error.facts["env"] == "broken"
    assert "layerzero-no-such-package" in error.facts["cause"]
    assert error.facts["repair"] == f"lz env build broken --manifests {tmp_path / 'manifests'}"
    assert results["tiny"] == plan(tiny, store=tmp_path)
    assert names(tmp_path) == [".locks", plan(tiny, store=tmp_path).prefix.name]


@needs_uv
def test_wheel_with_another_hash_is_refused(tmp_path: Path, tiny: EnvManifest) -> None:
    """The lock is what protects users from a tampered index."""
    pins = read_lock(tiny, "cpu").pins.items()
    forged = "\n".join(f"{name}=={version} --hash=sha256:{'0' * 64}" for name, version in pins)
    broken = third_party(tmp_path / "manifests", forged, "msgpack")
    with pytest.raises(EnvError, match=r"(?i)hash"):
        ensure(broken, store=tmp_path)


@needs_uv
def test_lock_resolves_to_hashes_and_nothing_else(tmp_path: Path) -> None:
    """A lock that names an index or a folder of one machine is useless on another."""
    manifest = third_party(tmp_path / "manifests", "", "msgpack==1.1.2")
    made = lock(manifest, "cpu")
    assert made.pins["msgpack"] == "1.1.2"
    assert set(made.pins) == {"msgpack", "pyzmq"}
    assert read_lock(manifest, "cpu") == made
    assert "://" not in made.text
    assert str(tmp_path) not in made.text
    assert made.text.splitlines()[1] == (
        "# Do not edit. Regenerate, in this folder: lz env lock broken --variant cpu --manifests ."
    )


@needs_uv
def test_requirement_that_does_not_resolve_is_reported_by_the_resolver(tmp_path: Path) -> None:
    """The resolver's own words are the best explanation there is."""
    manifest = third_party(tmp_path / "manifests", "", "msgpack==0.0.99")
    with pytest.raises(EnvError) as caught:
        lock(manifest, "cpu")
    assert "msgpack==0.0.99" in caught.value.facts["cause"]
    assert "lz env lock broken --variant cpu" in caught.value.facts["repair"]
    assert manifest.lock_path("cpu").read_text() == ""


def test_held_environment_survives_gc_and_force(tmp_path: Path, tiny: EnvManifest) -> None:
    """A worker that runs in it would lose its libraries."""
    env = ensure(tiny, store=tmp_path)
    held = hold(env)
    assert collect(tmp_path).in_use == (env.prefix,)  # tiny is no built-in: to gc without its folder it is stale
    with pytest.raises(EnvError, match="in use"):
        ensure(tiny, store=tmp_path, force=True)
    held.close()
    assert collect(tmp_path, [SAMPLES]).removed == ()
    assert [item.path for item in collect(tmp_path).removed] == [env.prefix]
    with pytest.raises(EnvError, match="lz env build tiny"):
        hold(env)


def command_line(store: Path, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [
        sys.executable,
        "-m",
        "layerzero.client.cli.app",
        "env",
        *args,
        "--json",
        "--store",
        str(store),
        "--manifests",
        str(SAMPLES),
    ]
    return forks.run(argv, env=os.environ)


def test_command_line_builds_and_probes(tmp_path: Path) -> None:
    """What `lz env build` calls ok has run its provider."""
    built = command_line(tmp_path, "build", "tiny")
    shutil.rmtree(tmp_path / "stage")  # as after an upgrade: the environment is there, today's worker code is not
    probed = command_line(tmp_path, "probe", "tiny")
    for ran in (built, probed):
        assert ran.returncode == 0, ran.stdout + ran.stderr
        [row] = json.loads(ran.stdout)["environments"]
        assert (row["name"], row["ok"], row["probe"]["versions"]["tiny"]) == ("tiny", True, "on")


def test_what_has_not_changed_is_not_probed_again_by_a_build(tmp_path: Path) -> None:
    """It took as long as the build. A verdict holds for exactly this environment, code and machine; a bad one may have
    been the machine's fault."""
    folder = tmp_path / "manifests"
    shutil.copytree(SAMPLES, folder)
    manifest = load(folder / "tiny.toml")
    env = ensure(manifest, store=tmp_path / "store")

    def is_kept(*, is_anew: bool = False) -> bool:
        return bool(verdict(manifest, env, 100.0, is_anew=is_anew)["probe_is_kept"])

    assert [is_kept(), is_kept(), is_kept(is_anew=True), is_kept()] == [False, True, False, True]
    provider = folder / "tiny.py"
    provider.write_text(provider.read_text() + "\n# changed\n")
    assert [is_kept(), is_kept()] == [False, True]
    provider.write_text("raise ImportError('nothing')\n")
    assert [is_kept(), is_kept()] == [False, False]


@needs_uv
def test_a_failed_build_says_once_what_the_installer_said(tmp_path: Path, tiny: EnvManifest) -> None:
    """Three copies of uv's words hide the line that helps."""
    text = read_lock(tiny, "cpu").text + f"torch==2.13.0+nosuch --hash=sha256:{'0' * 64}\n"
    broken = third_party(tmp_path / "manifests", text)
    broken.path.write_text(broken.path.read_text().replace("layerzero-no-such-package==1.0", "msgpack"))
    lines = io.StringIO()
    with pytest.raises(EnvError) as caught:
        ensure(load(broken.path), store=tmp_path, progress=Lines(lines))
    setting = "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/nosuch"
    cause = caught.value.facts["cause"]
    assert cause.splitlines()[0] == (
        f"torch==2.13.0+nosuch must come from an index or folder that has this build: {setting}, or a mirror of it"
    )
    assert caught.value.facts["repair"].startswith(f"{setting} lz env build broken --manifests ")
    last = cause.splitlines()[-1].strip()
    assert last not in lines.getvalue()


def test_command_line_tells_failure_from_wrong_usage(tmp_path: Path) -> None:
    """Scripts go by the exit code."""
    not_built = command_line(tmp_path, "probe", "tiny")
    assert not_built.returncode == 1
    assert json.loads(not_built.stdout)["environments"][0]["repair"] == f"lz env build tiny --manifests {SAMPLES}"
    unknown = command_line(tmp_path, "build", "tny")
    assert (unknown.returncode, unknown.stdout) == (2, "")


@needs_uv
def test_what_a_backend_never_imports_can_be_left_out_of_its_lock(tmp_path: Path) -> None:
    """Some libraries require a gigabyte for features that a backend does not use."""
    manifest = third_party(tmp_path / "manifests", "", "jinja2")
    text = manifest.path.read_text()
    manifest.path.write_text(f'{text}without = ["markupsafe"]\n')
    assert "markupsafe" not in lock(load(manifest.path), "cpu").pins
    assert "markupsafe" in lock(manifest, "cpu").pins
    with pytest.raises(EnvError, match=r"markupsafe is in the lock and in variants.cpu.without"):
        read_lock(load(manifest.path), "cpu")
