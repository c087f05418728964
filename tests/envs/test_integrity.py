"""Environments that are broken on purpose: what is said of them, that no worker starts there, and that the command
that is named repairs them. They are built with copies, so that the user's cache keeps its files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.envs.wheels import make_wheel, pack
from tests.process import forks
from tests.process.harness import Site, wait_until

import layerzero as lz
from layerzero.envs.build.build import drift, ensure, resolve
from layerzero.envs.build.env import Env
from layerzero.envs.build.installers import find_uv
from layerzero.envs.build.overlay import site_packages
from layerzero.envs.build.wheelhouse import Wheelhouse
from layerzero.envs.manifest import EnvManifest, load
from layerzero.envs.probe.probe import probe

SAMPLES = Path(__file__).parents[1] / "samples" / "manifests"
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
needs_uv = pytest.mark.skipif(find_uv() is None, reason="uv is not installed")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(autouse=True, scope="module")
def copies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_LINK_MODE", "copy")
        yield


@pytest.fixture(scope="module")
def mlx(store: Path) -> tuple[EnvManifest, Env]:
    manifest = resolve("mlx")
    return manifest, ensure(manifest, store=store)


@pytest.fixture
def tiny(store: Path) -> Env:
    return ensure(load(SAMPLES / "tiny.toml"), store=store)


@pytest.fixture
def breaking(request: pytest.FixtureRequest) -> Iterator[Callable[[Path, bytes | None], None]]:
    """Write a file with other bytes, or remove it; the file that was there, with its times, comes back."""
    kept: list[tuple[Path, Path]] = []

    def change(path: Path, data: bytes | None) -> None:
        aside = path.with_name(f"{path.name}.kept-by-test")
        path.rename(aside)
        kept.append((aside, path))
        if data is not None:
            path.write_bytes(data)

    yield change
    for aside, path in kept:
        aside.replace(path)


def site_of(env: Env) -> Path:
    return next(env.prefix.glob("lib/python*/site-packages"))


CORE, LIBRARY, MODULE = "mlx/core.cpython-311-x86_64-linux-gnu.so", "mlx/lib/libmlx.so", "mlx/_reprlib_fix.py"


@pytest.mark.parametrize(
    ("path", "damage", "kind", "missing", "wheel", "word"),
    [
        (LIBRARY, "remove", "import", "libmlx.so", "mlx_cpu", "cannot open shared object file"),
        (LIBRARY, "other library", "abi", "_ZN3mlx4core", "mlx_cpu", "undefined symbol"),
        (LIBRARY, "garbage", "import", "libmlx.so", "mlx_cpu", "invalid ELF header"),
        (CORE, "empty", "import", "core.cpython", "mlx", "file too short"),
        (CORE, "truncate", "crash", None, "mlx", "SIGBUS"),
        (MODULE, "remove", "import", "mlx._reprlib_fix", "mlx", "No module named 'mlx._reprlib_fix'"),
    ],
)
def test_probe_names_what_is_missing_its_wheel_and_the_repair(
    mlx: tuple[EnvManifest, Env],
    breaking: Callable[[Path, bytes | None], None],
    path: str,
    damage: str,
    kind: str,
    missing: str | None,
    wheel: str,
    word: str,
) -> None:
    """An ImportError alone leads nobody to the wheel that is broken."""
    manifest, env = mlx
    site = site_of(env)
    data = {
        "remove": lambda: None,
        "garbage": lambda: b"no library at all" * 400,
        "empty": lambda: b"",
        "truncate": lambda: (site / path).read_bytes()[:4096],
        "other library": lambda: next(site.glob("pyzmq.libs/libsodium*")).read_bytes(),
    }[damage]()
    breaking(site / path, data)
    record = probe(env, manifest)
    state = "is missing" if data is None else "has changed"
    assert (record.ok, record.kind, record.wheel.partition(" ")[0]) == (False, kind, wheel)
    assert missing in (record.missing or "") if missing else record.missing is None
    assert word in record.message
    assert f"{path} of {record.wheel} {state} since the build" in record.cause
    assert record.repair == "lz env build mlx"


def test_broken_wheel_is_named_even_where_nothing_has_changed_since_the_build(
    mlx: tuple[EnvManifest, Env], breaking: Callable[[Path, bytes | None], None]
) -> None:
    """A wheel may be broken as its project made it; then the files are as they were, and the error has to do."""
    manifest, env = mlx
    breaking(site_of(env) / LIBRARY, None)
    breaking(env.prefix / "lz-files.json", None)
    listed = site_of(env) / next(path.name for path in site_of(env).glob("mlx_cpu-*.dist-info")) / "RECORD"
    breaking(listed, "".join(x for x in listed.read_text().splitlines(True) if "libmlx.so" not in x).encode())
    record = probe(env, manifest)
    assert (record.kind, record.missing, record.wheel) == ("import", "libmlx.so", "")
    assert record.repair == "lz env build mlx --force"


def test_numpy_of_another_version_is_named(store: Path) -> None:
    """`pip install` into an environment is how most of them break."""
    manifest = resolve("onnxruntime")
    env = ensure(manifest, store=store)
    uv = find_uv()
    pip = (
        [uv, "pip", "install", "--python", env.python] if uv else [sys.executable, "-m", "pip", "--python", env.python]
    )
    subprocess.run([*pip, *([] if uv else ["install"]), "--quiet", "--no-deps", "numpy==2.1.3"], check=True)
    record = probe(env, manifest)
    assert (record.ok, record.kind, record.wheel) == (False, "abi", "numpy 1.26.4")
    assert "compiled using NumPy 1" in record.message
    assert "numpy 1.26.4 was replaced by numpy 2.1.3 since the build" in record.cause
    assert record.repair == "lz env build onnxruntime"


def test_what_python_compiles_and_what_libraries_write_is_no_drift(tiny: Env) -> None:
    """Bytecode comes with the first import; caches and logs beside a library harm nobody."""
    site = site_of(tiny)
    subprocess.run([tiny.python, "-m", "compileall", "-q", site], check=True)
    (site / "zmq" / "notes.txt").write_text("a cache")
    assert drift(tiny) == ""
    (site / "sitecustomize.py").write_text("import os\n")
    assert drift(tiny) == "sitecustomize.py was added since the build"
    (site / "sitecustomize.py").unlink()
    (site / "zmq" / "notes.txt").unlink()
    assert drift(tiny) == ""


def test_touched_or_copied_files_are_the_same_files(tiny: Env, tmp_path: Path) -> None:
    """A store that was restored from a backup has other inodes and times; it need not be built again."""
    file = site_of(tiny) / "msgpack" / "__init__.py"
    copy = tmp_path / "copy.py"
    shutil.copyfile(file, copy)
    copy.replace(file)
    assert drift(tiny) == ""
    assert (
        json.loads((tiny.prefix / "lz-files.json").read_text())["files"][str(file.relative_to(tiny.prefix))][2]
        == file.stat().st_ino
    )


def test_change_that_keeps_size_and_time_is_found_by_verify(
    tiny: Env, breaking: Callable[[Path, bytes | None], None]
) -> None:
    """The quick look cannot see it; who suspects a disk asks for all hashes."""
    file = site_of(tiny) / "msgpack" / "__init__.py"
    data, stat = file.read_bytes(), file.stat()
    with file.open("r+b") as same_inode:
        same_inode.write(bytes([data[0] ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    try:
        assert drift(tiny) == ""
        assert "msgpack/__init__.py of msgpack" in drift(tiny, verify=True)
        said = command_line(tiny.store, "probe", "tiny", "--verify")
        [row] = json.loads(said.stdout)["environments"]
        assert (said.returncode, row["ok"], row["repair"]) == (
            *(1, False),
            f"lz env build tiny --manifests {SAMPLES} --force",
        )
    finally:
        file.write_bytes(data)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


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


def test_list_shows_the_change_and_build_repairs_it(tiny: Env) -> None:
    """The command that is printed must be the one that helps."""
    file = site_of(tiny) / "msgpack" / "exceptions.py"
    file.unlink()
    rows = {row["name"]: row for row in json.loads(command_line(tiny.store, "list").stdout)["environments"]}
    assert rows["tiny"]["state"] == "changed"
    assert rows["tiny"]["cause"].startswith("msgpack/exceptions.py of msgpack ")
    repaired = command_line(tiny.store, *rows["tiny"]["repair"].split()[2:])
    assert repaired.returncode == 0, repaired.stderr
    assert file.is_file()
    assert drift(tiny) == ""


@needs_uv
def test_build_repairs_what_was_changed_through_a_link_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv links files from its cache: who edits one in an environment edits the cache, and all that are built later."""
    monkeypatch.setenv("UV_LINK_MODE", "hardlink")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    house = tmp_path / "house"
    make_wheel(house, "leaf", "3.0")
    for name in ("pyzmq", "msgpack"):
        pack(house, name)
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "leafy.toml").write_text(
        f'summary = "s"\nprovider = "null"\ndescriptor = "null"\npython = "{MINOR}"\n'
        '[variants.cpu]\nrequirements = ["leaf"]\n'
    )
    wheels = [Wheelhouse(house).wheels(name)[0] for name in ("leaf", "pyzmq", "msgpack")]
    (folder / "leafy.cpu.txt").write_text(
        "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheels)
    )
    manifest = load(folder / "leafy.toml")
    env = ensure(manifest, store=tmp_path / "store", wheelhouse=house)
    file = site_packages(env.prefix, MINOR) / "leaf.py"
    assert file.stat().st_nlink > 1
    with file.open("a") as linked:
        linked.write("import os\n")
    assert "leaf.py of leaf 3.0 has changed" in drift(env)
    ensure(manifest, store=tmp_path / "store", wheelhouse=house)
    assert (file.read_text(), drift(env)) == ("VERSION = '3.0'\n", "")


def test_worker_does_not_start_where_a_file_has_changed(
    tiny: Env, new_site: Callable[..., Site], breaking: Callable[[Path, bytes | None], None]
) -> None:
    """What was certified is not what would run. Status, explain, the error and the doctor give the same reason."""
    site = new_site(manifest_dirs=SAMPLES, backoff_s=0.01).start()
    site.connect()
    lz.null(backend="tiny")
    path = site_of(tiny) / "msgpack" / "fallback.py"
    breaking(path, path.read_bytes() + b"\n")
    os.kill(site.backend("tiny")["pid"], signal.SIGKILL)
    wait_until(lambda: site.backend("tiny")["state"] == "disabled")
    reason = site.backend("tiny")["unavailable"]
    assert reason["code"] == "ENV_CHANGED"
    with pytest.raises(lz.LayerZeroError) as caught:
        lz.null(backend="tiny")
    for text in (reason["detail"], str(caught.value)):
        assert "msgpack/fallback.py of msgpack" in text
        assert "lz env build tiny" in text
    explained = next(c for c in lz.explain("null").candidates if c.kernel_id == "tiny.null")
    assert [reason.code for reason in explained.reasons] == ["ENV_CHANGED"]
    lz.null()
    considered = {c.kernel_id: [r.code for r in c.reasons] for c in lz.last_report().candidates}
    assert considered["tiny.null"] == ["ENV_CHANGED"]
    check = next(c for c in lz.readiness_check(backends=["tiny"]).checks if c.name == "environment tiny")
    assert (check.ok, check.repair) == (False, f"lz env build tiny --manifests {SAMPLES}")
