"""Take an environment to a machine without a network: its manifest, lock, wheels and certificate in one file."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from layerzero.capabilities.certificate import ProbeRecord
from layerzero.envs.build import interpreters
from layerzero.envs.build.base import inspect
from layerzero.envs.build.build import ensure, plan
from layerzero.envs.build.env import Env
from layerzero.envs.build.installers import Pip, Runner, ToolFailed
from layerzero.envs.build.lock import Lock, read_lock
from layerzero.envs.build.progress import Progress, Quiet
from layerzero.envs.build.resolution import select
from layerzero.envs.build.store import discard, lock_path, locked
from layerzero.envs.build.wheelhouse import Wheelhouse
from layerzero.envs.manifest import EnvManifest, VariantName, discover, load
from layerzero.envs.probe.probe import cached_probe, parse_record
from layerzero.envs.transfer import archive
from layerzero.envs.transfer.archive import Index
from layerzero.ipc.errors import EnvError
from layerzero.ipc.version import __version__

_CERTIFICATE = "probe/certificate.json"
HOUSES = "wheelhouses"


@dataclass(frozen=True)
class Exported:
    path: Path
    index: Index
    sha256: str  # of the whole file
    nbytes: int


@dataclass(frozen=True)
class Imported:
    """`certificate`: what the probe said where it was exported; a claim, and no verdict on this machine."""

    env: Env
    manifest: EnvManifest
    certificate: ProbeRecord | None


def export(
    manifest: EnvManifest,
    target: Path,
    *,
    store: Path,
    variant: VariantName = "cpu",
    wheelhouse: Path | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write `target`, from which `import_` builds the environment on a machine of the same platform and Python.

    The wheels come from `wheelhouse`, else pip downloads them; each is checked against the lock. The environment need
    not be built; where it is and its probe passed, the certificate goes along. Raises EnvError, ConfigError.
    """
    if manifest.interpreter == "host":
        raise _refused(manifest.name, "runs in the broker's own interpreter: there is nothing to export", "lz env list")
    if manifest.image is not None:
        raise _refused(manifest.name, f"is what image {manifest.image} has: carry that", "lz env list")
    if manifest.interpreter == "existing":
        raise _refused(manifest.name, "runs in an interpreter that this machine has: carry that", "lz env list")
    if manifest.hub is not None:
        what = (
            "has kernels of the hub, which an export does not carry; carry the manifest, its locks and the repository's"
        )
        raise _refused(
            manifest.name, f"{what} folder", f"lz env build {manifest.name} --hub-folder DIR, on that machine"
        )
    lock = read_lock(manifest, variant)
    env = plan(manifest, variant=variant, store=store)
    python = interpreters.find(str(manifest.python), manifest.name)
    say = progress or Quiet()
    files: dict[str, Path | bytes] = dict(_description(manifest, lock))
    record = cached_probe(env, manifest) if env.is_built else None
    if record is not None and record.ok:
        files[_CERTIFICATE] = json.dumps(record.to_json()).encode()
    with (
        _failing_plainly(manifest.name, target),
        tempfile.TemporaryDirectory(prefix=".lz-export-", dir=target.absolute().parent) as folder,
    ):
        house = wheelhouse or Path(folder)
        if wheelhouse is None:
            say.phase(env.name, f"downloading {len(lock.pins)} wheels")
            _download(lock, python.path, house, lambda line: say.phase(env.name, line))
        wheels = select(env.name, lock, inspect(python.path), Wheelhouse(house)).wheels.values()
        files |= {f"wheels/{wheel.path.name}": wheel.path for wheel in wheels}
        say.phase(env.name, f"writing {target}")
        about = {
            "name": manifest.name,
            "variant": variant,
            "python": python.version,
            "platform": python.platform,
            "env_id": env.id,
            "made_by": f"layerzero-broker {__version__}",
        }
        index = archive.write(target, about, files)
    return Exported(target, index, archive.sha256_of(target), target.stat().st_size)


def import_(
    source: Path,
    *,
    store: Path,
    folders: list[Path],
    into: Path | None = None,
    sha256: str | None = None,
    progress: Progress | None = None,
    force: bool = False,
) -> Imported:
    """Check an archive and build its environment from its wheels, without a network. The wheels stay in the store, for
    repairs, until gc removes them with the environment.

    An environment that this installation has must be the same: manifest and lock. The files of any other are put into
    `into`, a folder for LAYERZERO_MANIFEST_DIRS. `sha256`: what the whole file must have. Raises EnvError, ConfigError.
    """
    say = progress or Quiet()
    houses = store.absolute() / HOUSES
    houses.mkdir(parents=True, exist_ok=True)
    with _unpacked(houses, source, sha256) as (folder, index):
        say.phase(index.name, f"{source}: {len(index.files)} files are as its index says")
        _check_contents(source, folder, index)
        manifest = _manifest(source, folder, index, folders, into)
        python = interpreters.find(index.minor, index.name)
        if python.platform != index.platform:
            cause = f"{source} is for {index.platform}; this machine is {python.platform}"
            raise _refused(index.name, cause, "lz env export on a machine like this one")
        env = plan(manifest, variant=index.variant, store=store)
        select(env.name, read_lock(manifest, index.variant), inspect(python.path), Wheelhouse(folder / "wheels"))
        certificate = _certificate(source, folder, index)
        house = houses / env.lock_target.name
        _keep(folder / "wheels", house)
    env = ensure(manifest, store=store, variant=index.variant, wheelhouse=house, progress=progress, force=force)
    return Imported(env, manifest, certificate)


def lost(claimed: ProbeRecord, here: ProbeRecord) -> list[str]:
    """What was certified where the archive was made, and is not here: "KERNEL in DTYPE, class CLASS"."""
    return [
        f"{kernel_id} in {dtype}, class {shape_class}"
        for kernel_id, dtypes in claimed.certified.items()
        for dtype, classes in dtypes.items()
        for shape_class in classes
        if shape_class not in here.certified.get(kernel_id, {}).get(dtype, {})
    ]


def _description(manifest: EnvManifest, lock: Lock) -> Iterator[tuple[str, bytes]]:
    """(path in the archive, content) of what is not wheels."""
    yield f"manifest/{manifest.name}.toml", manifest.path.read_bytes()
    yield f"lock/{lock.path.name}", lock.text.encode()
    for value in (manifest.provider, manifest.descriptor):
        if value.endswith((".py", ".json")):
            if "/" in value:
                cause = (
                    f"{manifest.path}: {value} is in a folder of its own; only files beside the manifest are exported"
                )
                raise _refused(manifest.name, cause, f"move {value} beside {manifest.path.name}")
            yield f"manifest/{value}", (manifest.path.parent / value).read_bytes()


def _download(lock: Lock, python: Path, folder: Path, report: Callable[[str], None]) -> None:
    with tempfile.TemporaryFile() as no_lock:
        Pip().download(folder, python, lock.path, Runner(folder, no_lock.fileno(), report))


def _check_contents(source: Path, folder: Path, index: Index) -> None:
    """That it has what an export has, and wheels that fit the disk when they are unpacked."""
    described = set(index.named("manifest"))
    strange = [
        path for path in described if not path.endswith((".py", ".json")) and path != f"manifest/{index.name}.toml"
    ]
    is_ours = f"manifest/{index.name}.toml" in described and not strange and len(described) <= 3
    if not is_ours or len(index.named("lock")) != 1 or set(index.named("probe")) - {_CERTIFICATE}:
        cause = f"{source}: an export has manifest/{index.name}.toml, one lock, wheels and at most {_CERTIFICATE}"
        raise _refused(index.name, cause, "lz env export it again")
    total = 0
    for path in index.named("wheels"):
        try:
            with zipfile.ZipFile(folder / path) as wheel:
                total += sum(info.file_size for info in wheel.infolist())
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as exc:
            raise _refused(index.name, f"{source}: {path} is no wheel ({exc})", "lz env export it again") from exc
    free = shutil.disk_usage(folder).free
    if total > free:
        cause = f"{source}: its wheels unpack to {total:,} bytes; {free:,} are free in {folder.parent}"
        raise _refused(index.name, cause, "free disk space, or set LAYERZERO_STORE to a larger disk")


def _manifest(source: Path, folder: Path, index: Index, folders: list[Path], into: Path | None) -> EnvManifest:
    """This installation's, when it is the same; else the archive's, put into `into`."""
    known, _ = discover(folders)
    texts = {Path(path).name: (folder / path).read_bytes() for path in (*index.named("manifest"), *index.named("lock"))}
    ours = known.get(index.name)
    if ours is not None:
        ours = ours.with_python(index.minor)
        lock = read_lock(ours, index.variant)
        here = dict(_description(ours, lock))
        theirs = {path: texts[Path(path).name] for path in (*index.named("manifest"), *index.named("lock"))}
        if differing := sorted(path for path in here.keys() | theirs.keys() if here.get(path) != theirs.get(path)):
            cause = f"{source}: {ours.path} is another {index.name}: {', '.join(differing)} differs"
            repair = f"lz env export {index.name} FILE, with the version of LayerZero that is here"
            raise _refused(index.name, cause, repair)
        return ours
    shutil.copy(folder / index.named("lock")[0], folder / "manifest")  # where `load` and `read_lock` look
    read_lock(load(folder / "manifest" / f"{index.name}.toml").with_python(index.minor), index.variant)
    if into is None:
        cause = (
            f"{source}: {index.name} is no environment of this installation; its provider is code that would run here"
        )
        again = f"lz env import {shlex.quote(str(source))}"
        repair = f"if you trust it, {again} --into DIR, and DIR in LAYERZERO_MANIFEST_DIRS or lz env add DIR"
        raise _refused(index.name, cause, repair)
    into.mkdir(parents=True, exist_ok=True)
    taken = [name for name, data in texts.items() if (into / name).exists() and (into / name).read_bytes() != data]
    if taken:
        cause = f"{into / taken[0]} exists, and is another file than the one in {source}"
        raise _refused(index.name, cause, "another folder for --into")
    for name, data in texts.items():
        (into / name).write_bytes(data)
    return load(into / f"{index.name}.toml").with_python(index.minor)


def _certificate(source: Path, folder: Path, index: Index) -> ProbeRecord | None:
    if _CERTIFICATE not in index.named("probe"):
        return None
    record = parse_record((folder / _CERTIFICATE).read_bytes())
    if record is None:
        raise _refused(index.name, f"{source}: {_CERTIFICATE} is no certificate", "lz env export it again")
    return record


def _keep(wheels: Path, house: Path) -> None:
    """Put the wheels where repairs find them."""
    with locked(house):
        discard(house)
        wheels.rename(house)


@contextmanager
def _unpacked(houses: Path, source: Path, sha256: str | None) -> Iterator[tuple[Path, Index]]:
    """(folder, index) of a checked archive. The folder is removed; gc removes what a killed import leaves, and leaves
    alone what a live one has locked."""
    target = houses / f"import-{os.getpid()}-{threading.get_ident()}"
    with locked(target):
        try:
            with tempfile.TemporaryDirectory(prefix=f".building-{target.name}-", dir=houses) as name:
                yield Path(name), archive.read(source, Path(name), sha256)
        finally:
            lock_path(target).unlink(missing_ok=True)  # no other import has its name


@contextmanager
def _failing_plainly(name: str, target: Path) -> Iterator[None]:
    try:
        yield
    except ToolFailed as exc:
        raise _refused(
            name, f"its wheels cannot be downloaded: {exc}", f"lz env export {name} {target} --wheelhouse DIR"
        ) from exc
    except OSError as exc:
        raise _refused(name, f"{exc.strerror or exc} ({exc.filename or target})", f"lz env export {name} FILE") from exc


def _refused(name: str, cause: str, repair: str) -> EnvError:
    return EnvError(f"environment {name}: {cause}\nto repair it: {repair}", env=name, cause=cause, repair=repair)
