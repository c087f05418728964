"""Environments that are taken to a machine without a network; plans of downloads; other Pythons. No index but our own:
a server in this process that counts what is fetched."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import signal
import socketserver
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.envs.wheels import make_wheel, pack
from tests.process import forks

from layerzero.envs.build.build import check, drift, ensure, find, plan
from layerzero.envs.build.downloads import of_lock
from layerzero.envs.build.installers import Pip, Uv, find_uv
from layerzero.envs.build.interpreters import available, host
from layerzero.envs.build.lock import read_lock
from layerzero.envs.build.overlay import site_packages
from layerzero.envs.build.wheelhouse import Wheelhouse
from layerzero.envs.manifest import EnvManifest, load
from layerzero.envs.probe.probe import probe_cached
from layerzero.envs.transfer.gc import collect
from layerzero.envs.transfer.transfer import export, import_, lost
from layerzero.ipc.errors import ConfigError, EnvError

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
SAMPLES = Path(__file__).parents[1] / "samples" / "manifests"
needs_uv = pytest.mark.skipif(find_uv() is None, reason="uv is not installed")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheelhouse with what workers need, and two packages more."""
    house = tmp_path_factory.mktemp("house")
    for name in ("pyzmq", "msgpack"):
        pack(house, name)
    make_wheel(house, "leaf", "3.0")
    make_wheel(house, "twig", "1.0", requires=["leaf"])
    return house


@pytest.fixture
def manifest(tmp_path: Path, wheels: Path) -> EnvManifest:
    """A third party's environment: provider and descriptor lie beside the manifest."""
    folder = tmp_path / "manifests"
    folder.mkdir()
    for suffix in (".py", ".json"):
        shutil.copy(SAMPLES / f"tiny{suffix}", folder)
    text = (SAMPLES / "tiny.toml").read_text().replace("requirements = []", 'requirements = ["twig"]')
    (folder / "tiny.toml").write_text(text.replace('python = "3.11"', f'python = "{MINOR}"'))
    (folder / "tiny.cpu.txt").write_text(lock_of(wheels))
    return load(folder / "tiny.toml")


def lock_of(house: Path) -> str:
    found = [Wheelhouse(house).wheels(name)[0] for name in ("leaf", "msgpack", "pyzmq", "twig")]
    return "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in found)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "PIP_FIND_LINKS", "UV_FIND_LINKS", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")


@pytest.mark.usefixtures("no_network")
def test_exported_environment_is_built_and_works_without_a_network(
    tmp_path: Path, manifest: EnvManifest, wheels: Path
) -> None:
    """On a machine that has neither its manifest nor its wheels; and it can be repaired there."""
    env = ensure(manifest, store=tmp_path / "here", wheelhouse=wheels)
    certified = probe_cached(env, manifest)
    assert certified.ok
    file = tmp_path / "tiny.tar.gz"
    made = export(manifest, file, store=tmp_path / "here", wheelhouse=wheels)
    assert made.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert len(made.index.named("wheels")) == 4

    there, into = tmp_path / "there", tmp_path / "into"
    with pytest.raises(EnvError, match=r"tiny is no environment of this installation.*(?s:.)*--into DIR"):
        import_(file, store=there, folders=[])
    got = import_(file, store=there, folders=[], into=into, sha256=made.sha256)
    assert (got.env.is_built, got.certificate) == (True, certified)
    assert got.certificate is not None
    assert lost(got.certificate, probe_cached(got.env, got.manifest)) == []
    assert sorted(path.name for path in into.glob("*.*")) == ["tiny.cpu.txt", "tiny.json", "tiny.py", "tiny.toml"]

    module = site_packages(got.env.prefix, MINOR) / "twig.py"
    module.unlink()
    house = there / "wheelhouses" / got.env.lock_target.name
    with pytest.raises(EnvError) as caught:
        check(find(got.manifest, store=there))
    assert caught.value.facts["repair"] == f"lz env build tiny --manifests {into} --offline --wheelhouse {house}"
    assert ensure(got.manifest, store=there, wheelhouse=house).is_built
    assert (module.is_file(), drift(got.env)) == (True, "")

    assert import_(file, store=there, folders=[into]).env.id == got.env.id  # known by now, and the same
    assert collect(there, [into]).removed == ()
    assert {item.path.parent.name for item in collect(there).removed} >= {"envs", "wheelhouses"}


@pytest.mark.usefixtures("no_network")
def test_import_refuses_what_is_not_what_it_says(tmp_path: Path, manifest: EnvManifest, wheels: Path) -> None:
    """Each part of an export vouches for another; an attacker would have to forge all."""
    file, store, into = tmp_path / "tiny.tar.gz", tmp_path / "there", tmp_path / "into"
    export(manifest, file, store=tmp_path / "here", wheelhouse=wheels)
    with pytest.raises(EnvError, match="SHA-256 is"):
        import_(file, store=store, folders=[], into=into, sha256="0" * 64)
    (manifest.path.parent / "tiny.py").write_text("LOADED = 1\n")
    with pytest.raises(EnvError, match=r"is another tiny: manifest/tiny\.py differs"):
        import_(file, store=store, folders=[manifest.path.parent])
    into.mkdir()
    (into / "tiny.py").write_text("mine")
    with pytest.raises(EnvError, match="exists, and is another file"):
        import_(file, store=store, folders=[], into=into)
    assert [path.name for path in into.iterdir()] == ["tiny.py"]
    assert not (store / "envs").exists()
    assert [path for path in (store / "wheelhouses").iterdir() if path.name != ".locks"] == []


def test_tampered_wheel_in_a_wheelhouse_is_refused(tmp_path: Path, manifest: EnvManifest, wheels: Path) -> None:
    """The lock is what protects users from whoever can write into the folder: for builds and for exports."""
    house = tmp_path / "house"
    shutil.copytree(wheels, house)
    make_wheel(house, "leaf", "3.0", requires=["evil"])
    for build in (
        lambda: ensure(manifest, store=tmp_path, wheelhouse=house),
        lambda: export(manifest, tmp_path / "a.tar.gz", store=tmp_path, wheelhouse=house),
    ):
        with pytest.raises(
            EnvError, match=r"leaf-3.0-py3-none-any.whl is not the file that tiny.cpu.txt lists: its SHA"
        ):
            build()
    assert not list(tmp_path.glob("*.tar.gz"))


class Index(http.server.BaseHTTPRequestHandler):
    """A package index of a folder, with sizes as PEP 700 has them."""

    house: Path
    fetched: list[str]
    stuck: str = ""  # a package whose wheel is sent to its half
    release: threading.Event

    def do_GET(self) -> None:
        part = self.path.strip("/").split("/")
        if part[0] == "simple":
            files = [path for path in self.house.iterdir() if path.name.split("-")[0].lower() == part[1]]
            listed = [
                {
                    "filename": path.name,
                    "url": f"/files/{path.name}",
                    "size": path.stat().st_size,
                    "hashes": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
                }
                for path in files
            ]
            answer = {"meta": {"api-version": "1.1"}, "name": part[1], "versions": [], "files": listed}
            self._send(json.dumps(answer).encode(), "application/vnd.pypi.simple.v1+json")
            return
        self.fetched.append(part[1].split("-")[0])
        data = (self.house / part[1]).read_bytes()
        self._send(data, "application/octet-stream", is_stuck=bool(self.stuck) and part[1].startswith(self.stuck))

    def _send(self, data: bytes, kind: str, *, is_stuck: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if is_stuck:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.release.wait(60)
            return
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Index]]:
    """All that uv and pip may ask."""
    handler = type("Ours", (Index,), {"house": wheels, "fetched": [], "release": threading.Event()})
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.setenv(name, url)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    yield handler
    handler.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


def uv_of(url: str) -> Uv:
    binary = find_uv()
    assert binary is not None
    return Uv(binary, (), {"UV_DEFAULT_INDEX": url, "UV_NO_CONFIG": "1"})


@needs_uv
def test_plan_says_what_is_cached_and_how_much_is_to_be_downloaded(
    tmp_path: Path, manifest: EnvManifest, wheels: Path, index: type[Index]
) -> None:
    """Before a gigabyte comes over a hotel's network."""
    lock, tool = read_lock(manifest, "cpu"), uv_of(os.environ["UV_DEFAULT_INDEX"])
    cold = of_lock(lock, host(), tool)
    sizes = {name: Wheelhouse(wheels).wheels(name)[0].path.stat().st_size for name in lock.pins}
    assert (dict(cold.sizes), cold.nbytes, index.fetched) == (sizes, sum(sizes.values()), [])
    assert str(cold) == f"4 wheels: 0 cached, 4 to download, {sum(sizes.values()) / 1e6:.1f} MB"
    ensure(manifest, store=tmp_path / "store", installer=tool)
    warm = of_lock(lock, host(), tool)
    assert str(warm) == "4 wheels, all of them here; nothing to download"
    assert "pip does not tell" in str(of_lock(lock, host(), Pip()))


@needs_uv
def test_build_that_was_killed_goes_on_where_it_was(tmp_path: Path, manifest: EnvManifest, index: type[Index]) -> None:
    """What was downloaded whole is not downloaded again, and nothing half is used."""
    index.stuck = "pyzmq"
    argv = [sys.executable, "-m", "layerzero.client.cli.app", "env", "build", "tiny", "--store", tmp_path / "store"]
    command = [*map(str, argv), "--manifests", str(manifest.path.parent)]
    killed = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    while set(index.fetched) != {"leaf", "msgpack", "pyzmq", "twig"}:
        assert killed.poll() is None
        threading.Event().wait(0.02)
    cache = tmp_path / "uv"
    while not {path.name.split("-")[0] for path in cache.glob("archive-v0/*/*.dist-info")} >= {
        "leaf",
        "msgpack",
        "twig",
    }:
        assert killed.poll() is None
        threading.Event().wait(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    index.release.set()
    assert not plan(manifest, store=tmp_path / "store").is_built
    index.fetched.clear()
    index.stuck = ""
    built = forks.run(command, env=os.environ)
    assert built.returncode == 0, built.stderr
    assert "pyzmq" in index.fetched
    assert len(index.fetched) < 4, index.fetched
    assert sorted(path.name for path in (tmp_path / "store" / "envs").iterdir()) == [
        ".locks",
        plan(manifest, store=tmp_path / "store").prefix.name,
    ]


@needs_uv
def test_environment_is_built_with_another_python_and_found(
    tmp_path: Path, wheels: Path, manifest: EnvManifest
) -> None:
    """A wheel that exists for one version only decides the Python of its environment, and of no other."""
    minor = next((minor for minor in available() if minor != MINOR), "")
    if not minor:
        pytest.skip(f"no other CPython than {MINOR} is installed")
    text = manifest.path.read_text().replace('python = "', f'other_pythons = ["{minor}"]\npython = "', 1)
    manifest.path.write_text(text.replace('requirements = ["twig"]', "requirements = []"))
    both = load(manifest.path)
    other, folder = both.with_python(minor), str(manifest.path.parent)
    argv = [sys.executable, "-m", "layerzero.client.cli.app", "env", "lock", "tiny", "--python", minor]
    ran = forks.run([*argv, "--manifests", folder], env=os.environ)
    assert ran.returncode == 0, ran.stderr
    env = ensure(other, store=tmp_path / "store")
    assert env.record()["python"].startswith(f"{minor}.")
    assert find(both, store=tmp_path / "store").id == env.id
    assert probe_cached(env, other).ok


def test_python_that_a_manifest_does_not_name_is_refused(manifest: EnvManifest) -> None:
    """With what it allows, and how to allow more."""
    with pytest.raises(ConfigError, match=rf"not made for Python 3.99; allowed: {MINOR}; .*lz env lock tiny --python"):
        manifest.with_python("3.99")


def test_python_that_is_not_here_is_refused_with_those_that_are(tmp_path: Path, manifest: EnvManifest) -> None:
    """ "Not found" alone leaves the user to search."""
    manifest.path.write_text(manifest.path.read_text().replace("python =", 'other_pythons = ["3.98"]\npython =', 1))
    (manifest.path.parent / "tiny.cpu.py398.txt").write_text(read_lock(manifest, "cpu").text)
    with pytest.raises(EnvError, match=rf"needs Python 3.98, and none was found; here are: .*{MINOR}"):
        ensure(load(manifest.path).with_python("3.98"), store=tmp_path)


def test_command_line_exports_and_imports(tmp_path: Path, manifest: EnvManifest, wheels: Path) -> None:
    """What an operator types; the certificate is compared with what this machine says."""
    folder, file = manifest.path.parent, tmp_path / "tiny.tar.gz"

    def lz_env(*args: str | Path) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "layerzero.client.cli.app", "env", *map(str, args), "--json"]
        return forks.run(argv, env=os.environ)

    store, common = ("--store", tmp_path / "store"), ("--manifests", folder)
    assert lz_env("build", "tiny", *store, *common, "--wheelhouse", wheels).returncode == 0
    made = lz_env("export", "tiny", file, *store, *common, "--wheelhouse", wheels)
    assert made.returncode == 0, made.stderr
    [row] = json.loads(made.stdout)["environments"]
    assert (row["wheels"], row["certificate"], row["nbytes"]) == (4, True, file.stat().st_size)
    got = lz_env("import", file, "--sha256", row["sha256"], "--store", tmp_path / "there", "--into", tmp_path / "into")
    assert got.returncode == 0, got.stderr
    [row] = json.loads(got.stdout)["environments"]
    assert (row["name"], row["ok"], row["certified_there_only"]) == ("tiny", True, [])
    with tarfile.open(file) as tar:
        assert tar.getnames()[0] == "lz-export.json"
    wrong = lz_env("import", file, "--sha256", "12", "--store", tmp_path / "there")
    assert (wrong.returncode, "is no SHA-256" in wrong.stderr) == (2, True)
    file.write_bytes(file.read_bytes()[:-100])
    cut = lz_env("import", file, "--store", tmp_path / "there")
    assert (cut.returncode, "no whole gzip file" in cut.stderr) == (1, True)
