"""Environments on a machine without a network: over an interpreter that has a stack already, and from a wheelhouse.

Every place that pip and uv could ask is a listener here that must not hear anything.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.envs.wheels import make_wheel, pack, unpack
from tests.process import forks
from tests.process.harness import Site, wait_until

import layerzero as lz
from layerzero.envs.build.base import inspect
from layerzero.envs.build.build import drift, ensure, find, hold, plan
from layerzero.envs.build.env import Env
from layerzero.envs.build.installers import InstallerName, find_uv, pick
from layerzero.envs.build.overlay import site_packages
from layerzero.envs.build.wheelhouse import Wheelhouse
from layerzero.envs.manifest import EnvManifest, load
from layerzero.envs.transfer.gc import collect
from layerzero.ipc.errors import EnvError

SAMPLES = Path(__file__).parents[1] / "samples" / "manifests"
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
INSTALLERS = [pytest.param("uv", marks=pytest.mark.skipif(find_uv() is None, reason="uv is not installed")), "pip"]
PLACES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All that the user configured leads to a port where a connection would be seen."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for name in (*PLACES, *PROXIES):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}/")
        yield
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.fixture(scope="module")
def worker_wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What every worker needs, as wheels."""
    return [pack(tmp_path_factory.mktemp("packed"), name) for name in ("pyzmq", "msgpack")]


@pytest.fixture
def base(tmp_path: Path, worker_wheels: list[Path]) -> Path:
    """A venv's interpreter with a heavy stack: `heavy` 2.0, which needs `part`, and what workers need."""
    folder = tmp_path / "base"
    venv.create(folder, symlinks=True)
    site = site_packages(folder, MINOR)
    made = [make_wheel(tmp_path / "made", "heavy", "2.0", requires=["part>=1"])]
    made += [make_wheel(tmp_path / "made", "part", "1.5"), make_wheel(tmp_path / "made", "light", "0.9")]
    for wheel in (*made, *worker_wheels):
        unpack(wheel, site)
    (site / "nested.pth").write_text(str(tmp_path / "editable") + "\n")  # as an editable install leaves
    (tmp_path / "editable").mkdir()
    (tmp_path / "editable" / "own_code.py").write_text("VERSION = 'edited'\n")
    return folder / "bin" / "python"


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A wheelhouse with what the base lacks, and an older version of it."""
    folder = tmp_path / "wheelhouse"
    make_wheel(folder, "light", "1.1", requires=["heavy>=2", "leaf"])
    make_wheel(folder, "light", "1.0", requires=["heavy>=2"])
    make_wheel(folder, "leaf", "3.0")
    return folder


@pytest.fixture
def manifest(tmp_path: Path) -> EnvManifest:
    """Wants `light` 1, which the base has too old. No lock."""
    return manifest_of(tmp_path, ["light>=1", "heavy"])


def manifest_of(folder: Path, requirements: list[str], variant: str = "cpu") -> EnvManifest:
    folder = folder / "manifests"
    folder.mkdir(exist_ok=True)
    for name in ("tiny.py", "tiny.json"):
        shutil.copy(SAMPLES / name, folder / name)
    text = (
        (SAMPLES / "tiny.toml").read_text().replace("requirements = []", f"requirements = {json.dumps(requirements)}")
    )
    (folder / "tiny.toml").write_text(
        text.replace("[variants.cpu]", f"[variants.{variant}]").replace('"on"', '"{site}"').replace("3.11", "3.10")
    )
    return load(folder / "tiny.toml")


def imported(env: Env, *modules: str) -> list[list[str]]:
    """[version, folder] of each module as a worker of that environment gets it."""
    code = (
        f"import json; found = [__import__(name) for name in {list(modules)!r}];"
        "print(json.dumps([[one.VERSION, one.__file__] for one in found]))"
    )
    environ = {**os.environ, **env.environ}
    ran = subprocess.run([env.python, "-c", code], env=environ, capture_output=True, text=True, check=True)
    return [[version, str(Path(file).parent)] for version, file in json.loads(ran.stdout)]


def reinstall(base: Path, name: str, old: str, new: str) -> None:
    """Upgrade a distribution of the base, as pip would."""
    site = site_packages(base.parent.parent, MINOR)
    shutil.rmtree(site / f"{name}-{old}.dist-info")
    unpack(make_wheel(base.parent.parent.parent / "upgrades", name, new), site)


@pytest.mark.parametrize("installer", INSTALLERS)
def test_overlay_has_its_wheels_first_and_the_rest_of_the_base(
    tmp_path: Path, base: Path, house: Path, manifest: EnvManifest, installer: InstallerName
) -> None:
    """That is the whole point: gigabytes stay where they are, and the few wheels that are missing come on top."""
    env = ensure(manifest, store=tmp_path / "store", base=base, wheelhouse=house, installer=pick(installer))
    below, own = str(site_packages(base.parent.parent, MINOR)), str(site_packages(env.prefix, MINOR))
    assert imported(env, "light", "leaf", "heavy", "part", "own_code") == [
        ["1.1", own],
        ["3.0", own],
        ["2.0", below],
        ["1.5", below],
        ["edited", str(tmp_path / "editable")],
    ]
    record = env.record()
    assert record["versions"] == {"light": "1.1", "leaf": "3.0"}
    taken = record["overlay"]["taken"]
    assert {name: taken[name] for name in ("heavy", "part")} == {"heavy": "2.0", "part": "1.5"}
    assert record["overlay"]["unlocked"] == ["leaf 3.0", "light 1.1"]
    assert env.environ["TINY_SETTING"] == own
    assert not list((tmp_path / "store" / "envs").glob(".building-*"))
    assert ensure(manifest, store=tmp_path / "store", base=base) == env  # built once; the wheelhouse may be gone


@pytest.mark.parametrize("installer", INSTALLERS)
def test_interpreter_that_is_no_venv_can_be_the_base(tmp_path: Path, installer: InstallerName) -> None:
    """Images of vendors have their stack in the system's interpreter."""
    system = Path(getattr(sys, "_base_executable", sys.executable))
    if "pip" not in inspect(system).dists:
        pytest.skip(f"{system} has no pip, the distribution that this test takes from it")
    house = tmp_path / "wheelhouse"
    for name in ("pyzmq", "msgpack"):
        pack(house, name)
    env = ensure(
        manifest_of(tmp_path, ["pip"]),
        store=tmp_path / "store",
        base=system,
        wheelhouse=house,
        installer=pick(installer),
    )
    assert env.record()["overlay"]["taken"]["pip"] == inspect(system).dists["pip"].version
    code = "import zmq, pip, sys; print(zmq.__file__); print(sys.prefix)"
    ran = subprocess.run([env.python, "-c", code], env=dict(env.environ), capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[:2] == [str(site_packages(env.prefix, MINOR) / "zmq/__init__.py"), str(env.prefix)]


def test_pip_needs_nothing_of_the_base_and_leaves_nothing_in_the_overlay(
    tmp_path: Path, base: Path, house: Path, manifest: EnvManifest
) -> None:
    """Debian's Python may lack ensurepip, and a pip or setuptools on top would hide those of the base."""
    if find_spec("pip") is None:
        pytest.skip("no pip is installed beside layerzero")
    (site_packages(base.parent.parent, MINOR) / "split.pth").write_text("import sys; sys.modules['ensurepip'] = None\n")
    env = ensure(manifest, store=tmp_path / "store", base=base, wheelhouse=house, installer=pick("pip"))
    installed = sorted(path.name for path in site_packages(env.prefix, MINOR).glob("*.dist-info"))
    assert installed == ["leaf-3.0.dist-info", "light-1.1.dist-info"]


def test_missing_wheel_is_named_with_what_is_there_and_how_to_fetch_it(
    tmp_path: Path, base: Path, house: Path, manifest: EnvManifest
) -> None:
    """Whoever carries wheels to a machine wants one list, not one round trip for each."""
    for wheel in house.iterdir():
        wheel.unlink()
    make_wheel(house, "light", "0.8")
    make_wheel(house, "light", "1.2", tag="cp27-cp27m-win32")
    make_wheel(house, "light", "1.3", requires_python="<3")
    with pytest.raises(EnvError) as caught:
        ensure(manifest_of(tmp_path, ["light>=1", "gone==4"]), store=tmp_path / "store", base=base, wheelhouse=house)
    lines = caught.value.facts["cause"].splitlines()
    assert lines[0] == f"gone==4 (wanted by tiny) is missing: {house} has no gone"
    assert lines[1].startswith(f"light>=1 (wanted by tiny) is missing: {base} has light 0.9; {house} has ")
    assert "light-0.8-py3-none-any.whl" in lines[1]
    assert f"light-1.2-cp27-cp27m-win32.whl (is not for cp{MINOR.replace('.', '')} on linux" in lines[1]
    assert "light-1.3-py3-none-any.whl (needs Python <3)" in lines[1]
    repair = caught.value.facts["repair"]
    assert repair.startswith(
        f"python -m pip download --no-deps --only-binary :all: --dest {house} --python-version {MINOR}"
    )
    assert repair.endswith(" gone==4 'light>=1'")
    assert not list((tmp_path / "store" / "envs").glob("tiny*"))


def test_wheel_that_is_not_the_locked_one_is_refused(
    tmp_path: Path, base: Path, house: Path, manifest: EnvManifest
) -> None:
    """What was carried by hand is checked against what was locked; a locked version goes before a newer one."""
    lock = manifest.lock_path("cpu")
    locked = Wheelhouse(house).wheels("light")[0]
    assert str(locked.version) == "1.0"
    lock.write_text(f"light==1.0 --hash=sha256:{locked.sha256}\n")
    env = ensure(manifest, store=tmp_path / "store", base=base, wheelhouse=house)
    assert (env.record()["versions"], env.record()["overlay"]["unlocked"]) == ({"light": "1.0"}, [])
    lock.write_text(f"light==1.0 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(EnvError, match=r"light-1.0-py3-none-any.whl is not the file that tiny.cpu.txt lists"):
        ensure(manifest, store=tmp_path / "store", base=base, wheelhouse=house)


def test_wheel_that_hides_what_the_base_needs_is_refused(tmp_path: Path, base: Path, house: Path) -> None:
    """It would import, and fail in the middle of the base's own code."""
    make_wheel(house, "part", "0.5")
    with pytest.raises(EnvError, match=r"part-0.5-py3-none-any.whl cannot go over .*: heavy 2.0 there needs part>=1"):
        ensure(manifest_of(tmp_path, ["heavy", "part<1"]), store=tmp_path / "store", base=base, wheelhouse=house)


def test_base_that_changed_is_refused_until_the_overlay_is_built_again(
    tmp_path: Path, base: Path, house: Path, manifest: EnvManifest
) -> None:
    """The wheels on top were made for the libraries that were below: another torch gives crashes or wrong numbers."""
    store = tmp_path / "store"
    env = ensure(manifest, store=store, base=base, wheelhouse=house)
    hold(env).close()
    reinstall(base, "heavy", "2.0", "2.1")
    assert drift(env) == f"{base} has changed since the build: heavy 2.0 is now 2.1"
    with pytest.raises(EnvError) as caught:
        hold(env)
    over = f"--manifests {manifest.path.parent} --overlay {base} --offline --wheelhouse {house}"
    assert caught.value.facts["repair"] == f"lz env build tiny {over}"
    again = ensure(manifest, store=store, base=base, wheelhouse=house)
    assert again.id != env.id
    assert plan(manifest, store=store, base=base) == again
    hold(again).close()
    reinstall(base, "heavy", "2.1", "2.0")
    assert plan(manifest, store=store, base=base) == env  # what was built for this state is there still
    unrelated = make_wheel(tmp_path / "made", "unrelated", "1.0")
    unpack(unrelated, site_packages(base.parent.parent, MINOR))
    assert drift(env) == ""


def test_overlays_are_collected_when_nothing_leads_to_them(
    tmp_path: Path, base: Path, house: Path, manifest: EnvManifest
) -> None:
    """gc is told of no overlay; the records of what is built tell it."""
    store, folders = tmp_path / "store", [tmp_path / "manifests"]
    old = ensure(manifest, store=store, base=base, wheelhouse=house)
    reinstall(base, "heavy", "2.0", "2.1")
    current = ensure(manifest, store=store, base=base, wheelhouse=house)
    assert [item.path for item in collect(store, folders).removed] == [old.prefix]
    shutil.rmtree(base.parent.parent)
    assert [item.path for item in collect(store, folders).removed] == [current.prefix]


def make_lock(manifest: EnvManifest, house: Path) -> None:
    """The lock of all that lies in the wheelhouse."""
    wheels = [Wheelhouse(house).wheels(path.name.split("-")[0])[-1] for path in sorted(house.iterdir())]
    lines = dict.fromkeys(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheels)
    manifest.lock_path("cpu").write_text("".join(lines))


@pytest.mark.parametrize("installer", INSTALLERS)
def test_environment_of_a_lock_is_built_from_a_wheelhouse_alone(
    tmp_path: Path, installer: InstallerName, worker_wheels: list[Path]
) -> None:
    """Without an interpreter to build on, the wheelhouse has all of the lock, and is checked against it."""
    house = tmp_path / "wheelhouse"
    make_wheel(house, "leaf", "3.0")
    for wheel in worker_wheels:
        shutil.copy(wheel, house)
    manifest = manifest_of(tmp_path, ["leaf"]).model_copy(update={"python": MINOR})
    make_lock(manifest, house)
    env = ensure(manifest, store=tmp_path / "store", wheelhouse=house, installer=pick(installer))
    assert imported(env, "leaf") == [["3.0", str(site_packages(env.prefix, MINOR))]]
    assert env == plan(manifest, store=tmp_path / "store") or env.wheelhouse == house
    (house / "leaf-3.0-py3-none-any.whl").unlink()
    with pytest.raises(EnvError, match=r"leaf==3.0 \(wanted by tiny.cpu.txt\) is missing: .*wheelhouse has no leaf"):
        ensure(manifest, store=tmp_path / "store", wheelhouse=house, installer=pick(installer), force=True)
    assert env.is_built


def test_overlay_is_used_where_it_is_built_and_else_the_environment_of_the_lock(
    tmp_path: Path, base: Path, house: Path, manifest: EnvManifest, worker_wheels: list[Path]
) -> None:
    """One setting holds for all backends, also for those that have an environment of their own already."""
    store = tmp_path / "store"
    assert not find(manifest, store=store, base=base).is_built
    make_wheel(house, "heavy", "2.0")
    for wheel in worker_wheels:
        shutil.copy(wheel, house)
    own = manifest.model_copy(update={"python": MINOR})
    make_lock(own, house)
    built = ensure(own, store=store, wheelhouse=house)
    assert find(own, store=store, base=base).id == built.id
    assert find(own, store=store, base=tmp_path / "absent").id == built.id
    over = ensure(own, store=store, base=base, wheelhouse=house)
    assert find(own, store=store, base=base).id == over.id
    assert find(own, store=store).id == built.id


def command_line(*args: str | Path, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    argv = [sys.executable, "-m", "layerzero.client.cli.app", "env", *map(str, args)]
    return forks.run(argv, env=environ)


def test_command_line_builds_probes_and_lists_overlays(tmp_path: Path, base: Path, house: Path) -> None:
    """What an operator types on the machine without a network, and what is then shown."""
    manifest_of(tmp_path, ["light>=1", "heavy"], variant="cu13")
    common = ("--store", tmp_path / "store", "--manifests", tmp_path / "manifests", "--json")
    offline = ("--offline", "--wheelhouse", house, "--overlay", base)
    built = command_line("build", "tiny", *offline, *common, LAYERZERO_VARIANT="cu13")
    assert built.returncode == 0, built.stdout + built.stderr
    [row] = json.loads(built.stdout)["environments"]
    assert row["ok"]
    assert "no lock has light 1.1: its hash is recorded, not verified" in built.stderr
    listed = command_line("list", *common, LAYERZERO_VARIANT="cu13", LAYERZERO_OVERLAY=base)
    rows = {row["name"]: row for row in json.loads(listed.stdout)["environments"]}
    shown = {name: rows["tiny"][name] for name in ("state", "base", "python", "probe", "id")}
    assert shown == {"state": "overlay", "base": str(base), "python": MINOR, "probe": "ok", "id": row["id"]}
    assert rows["null"]["state"] == "host"
    reinstall(base, "heavy", "2.0", "2.2")
    listed = command_line("list", *common, LAYERZERO_VARIANT="cu13", LAYERZERO_OVERLAY=base)
    rows = {row["name"]: row for row in json.loads(listed.stdout)["environments"]}
    assert rows["tiny"]["state"] == "outdated"
    assert rows["tiny"]["cause"] == f"{base} has changed since the build: heavy 2.0 is now 2.2"
    nothing = command_line("build", "tiny", "--offline", *common)
    assert (nothing.returncode, "--wheelhouse DIR" in nothing.stderr) == (2, True)


def test_broker_serves_from_overlays_by_its_setting(
    base: Path, house: Path, manifest: EnvManifest, store: Path, new_site: Callable[..., Site]
) -> None:
    """Set once, in the environment or in config.toml; and a base that changed is seen when a worker starts."""
    env = ensure(manifest, store=store, base=base, wheelhouse=house)
    site = new_site(overlay=base, manifest_dirs=manifest.path.parent, backoff_s=0.01).start()
    site.connect()
    lz.null(backend="tiny")
    assert lz.last_report().backend == "tiny"
    facts = site.backend("tiny")
    assert (facts["overlay"], facts["env"]) == (str(base), env.id)
    reinstall(base, "heavy", "2.0", "2.1")
    os.kill(facts["pid"], signal.SIGKILL)
    wait_until(lambda: site.backend("tiny")["state"] not in ("ready", "starting"))
    with pytest.raises(lz.LayerZeroError) as caught:
        lz.null(backend="tiny")
    assert "heavy 2.0 is now 2.1" in str(caught.value)
    over = f"--manifests {manifest.path.parent} --overlay {base} --offline --wheelhouse {house}"
    assert f"lz env build tiny {over}" in str(caught.value)
