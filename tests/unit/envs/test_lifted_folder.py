"""Folders of lifted calls: what is written is read again; what was changed, or never right, is refused as a whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from layerzero.capabilities.certificate import ProbeRecord
from layerzero.capabilities.descriptor import parse
from layerzero.envs import signing
from layerzero.envs.lifted import folder as folders
from layerzero.envs.lifted import imports as imports_module
from layerzero.envs.lifted.contents import ExportedBackend, ExportedCall, MeasuredTime, Wrong
from layerzero.envs.lifted.imports import Imports
from layerzero.ipc.errors import ConfigError
from layerzero.ipc.lifting.form import Address, Kernel, Lifted, Patch, Span, digest
from layerzero.ipc.lifting.keys import WHAT
from layerzero.ipc.lifting.specimen import SEEDS
from layerzero.ipc.transport.plain import pack_body, unpack_body
from layerzero.ipc.vocabulary.tensors import TensorSpec

CODE, OTHER_CODE = b"machine code", b"other machine code"
KERNEL: dict[str, Any] = {
    "kernel_id": "one.silu",
    "source": "test",
    "priority": 70,
    "dtypes": ["float32"],
    "deterministic": True,
}
DESCRIPTOR: dict[str, Any] = {
    "schema_version": "1.0",
    "backend": "one",
    "backend_version": "1",
    "platform": "cuda",
    "ops": {"silu": [KERNEL]},
}
CAPABILITY = parse(json.dumps(DESCRIPTOR), "test")
RECORD = ProbeRecord("one", "key", True, 0.1, {"torch": "2"}, {"one.silu": {}}, {"one.silu": {"float32": {"any": 0.0}}})
TIME = MeasuredTime(
    kernel_id="one.silu", key="silu", count=3, median_us=2.0, p95_us=3.0, variance_us=0.1, warmup_ms=0.0
)
BACKEND = ExportedBackend(CAPABILITY, "env-1", RECORD, (TIME,))
WHAT_OF: dict[str, str] = dict.fromkeys(WHAT, "") | {
    "kernel": "one.silu",
    "backend": "one",
    "gpu": "a GPU",
    "driver_version": "580",
    "backend_version": "1",
    "torch_version": "2",
    "capabilities_hash": CAPABILITY.hash,
    "env_hash": "env-1",
}


def lifted(count: int = 4, code: bytes = CODE) -> Lifted:
    spec = TensorSpec.contiguous("float32", (count,))
    kernel = Kernel(
        digest(code), "silu", (count, 1, 1), (8, 1, 1), 0, bytes(16), (Span(0, 8), Span(8, 8)),
        (Patch(0, Address("input", 0, 0)), Patch(8, Address("output", 0, 0))),
    )  # fmt: skip
    return Lifted("silu", "one.silu", (spec,), (spec,), {}, (16, 16), (), (kernel,))


CALL = ExportedCall(lifted(), WHAT_OF, dict.fromkeys(SEEDS, ("aa",)))
LIKE = ExportedCall(lifted(5), WHAT_OF)  # without trials


def contents(*calls: ExportedCall, codes: tuple[bytes, ...] = (CODE,)) -> dict[str, bytes]:
    return {
        "backends/one.json": BACKEND.pack(),
        **{f"calls/{call.key}": call.pack() for call in calls},
        **{f"code/{digest(code)}": code for code in codes},
    }


class Bench:
    """A key that is trusted, a folder signed with it, and a store."""

    def __init__(self, top: Path) -> None:
        self.keys, self.private, self.folder = top / "keys", top / "lift.key", top / "folder"
        signing.make(self.private)
        signing.trust(self.keys, "ci", signing.public_path(self.private))
        self.imports = Imports(top / "store")

    def write(self, parts: dict[str, bytes], *, is_signed: bool = True) -> None:
        key = signing.read_private(self.private) if is_signed else None
        folders.write(self.folder, iter(parts.items()), key)

    def take(self, name: str = "a", *, allows_unsigned: bool = False) -> Any:
        opened = folders.open_folder(self.folder, self.keys, allows_unsigned=allows_unsigned)
        return self.imports.install(opened, name)

    @property
    def is_empty(self) -> bool:
        """Nothing is there, not even files that no import has."""
        data = self.imports.folder / "data"
        return self.imports.all() == ([], []) and not (data.is_dir() and any(data.iterdir()))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_what_was_written_is_there_again(bench: Bench) -> None:
    bench.write(contents(CALL, LIKE))
    assert bench.take().signer == "ci"
    ((one,), problems) = bench.imports.all()
    assert (one.name, one.signer, one.backends, problems) == ("a", "ci", ["one"], [])
    assert one.backend("one") == BACKEND
    by_key = {call.key: call for call in one.calls_of("one")}
    own, proof = one.specimen(by_key[CALL.key])
    assert own == proof
    assert (own.lifted, own.codes, own.trials) == (CALL.lifted, {digest(CODE): CODE}, CALL.trials)
    own, proof = one.specimen(by_key[LIKE.key])  # its neighbour is tried in its place
    assert (own.lifted, proof.lifted, proof.trials) == (LIKE.lifted, CALL.lifted, CALL.trials)


def test_importing_again_replaces_and_removing_leaves_nothing(bench: Bench) -> None:
    bench.write(contents(CALL, LIKE))
    bench.take()
    bench.folder.rename(bench.folder.with_name("before"))
    bench.write(contents(CALL))
    bench.take()
    ((one,), _) = bench.imports.all()
    assert [call.key for call in one.calls_of("one")] == [CALL.key]
    assert len(list((bench.imports.folder / "data").iterdir())) == 1
    assert bench.imports.remove("a")
    assert not bench.imports.remove("a")
    assert bench.is_empty


# --- signatures


def test_who_signed_must_be_trusted(bench: Bench, tmp_path: Path) -> None:
    bench.write(contents(CALL))
    assert signing.distrust(bench.keys, "ci")
    other = tmp_path / "other.key"
    signing.make(other)
    signing.trust(bench.keys, "other", signing.public_path(other))
    said = signing.fingerprint(signing.read_private(bench.private).public_key())
    for allows_unsigned in (False, True):  # leave for none is no leave for anybody's
        with pytest.raises(ConfigError, match=rf"^trust its key .*{said}.*trusted: other"):
            bench.take(allows_unsigned=allows_unsigned)
    assert bench.is_empty


def test_what_nobody_signed_needs_explicit_leave(bench: Bench) -> None:
    bench.write(contents(CALL), is_signed=False)
    with pytest.raises(ConfigError, match=r"^have it signed .* or pass --allow-unsigned"):
        bench.take()
    assert bench.is_empty
    assert bench.take(allows_unsigned=True).signer == ""


def test_a_changed_manifest_or_signature_is_nobodys(bench: Bench) -> None:
    bench.write(contents(CALL))
    for name in (folders.MANIFEST, folders.SIGNATURE):
        path = bench.folder / name
        was = path.read_bytes()
        for harmed in (flipped(was), was[:-1], was + b"\n", b""):
            path.write_bytes(harmed)
            with pytest.raises(ConfigError):
                bench.take(allows_unsigned=True)
        path.write_bytes(was)
    assert bench.is_empty
    bench.take()


def test_a_private_key_is_its_owners_alone(bench: Bench) -> None:
    assert bench.private.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"^choose another file"):
        signing.make(bench.private)
    bench.private.chmod(0o640)
    with pytest.raises(ConfigError, match=r"^chmod 600 "):
        signing.read_private(bench.private)
    with pytest.raises(ConfigError, match=r"^make a key first: lz lift key"):
        signing.read_private(bench.private.with_name("none"))
    for wrong in (bench.private, bench.private.with_name("none")):
        with pytest.raises(ConfigError, match=r"^name a file with a public key"):
            signing.trust(bench.keys, "x", wrong)
    with pytest.raises(ConfigError, match=r"^choose another name"):
        signing.trust(bench.keys, "../x", signing.public_path(bench.private))


# --- files


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


HARMS: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "gone": Path.unlink,
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a way out": lambda path: (path.rename(path.parents[2] / "outside"), path.symlink_to(path.parents[2] / "outside")),
}


@pytest.mark.parametrize("kind", ["backends", "calls", "code"])
@pytest.mark.parametrize("harm", HARMS)
def test_one_file_that_does_not_hold_refuses_all(bench: Bench, kind: str, harm: str) -> None:
    bench.write(contents(CALL))
    (path,) = (bench.folder / kind).iterdir()
    HARMS[harm](path)
    with pytest.raises(ConfigError, match=f"^export it again.* nothing of .* was imported: {kind}/"):
        bench.take()
    assert bench.is_empty


def listed(**changes: Any) -> dict[str, Any]:
    return {"path": f"code/{'0' * 64}", "size": 4, "sha256": "0" * 64, **changes}


@pytest.mark.parametrize(
    "file",
    [
        listed(path="../../evil"),
        listed(path="/etc/passwd"),
        listed(path="calls/../../evil"),
        listed(path=f"code/{'0' * 64}/x"),
        listed(path="backends/../x.json"),
        listed(path="backends/.x.json"),
        listed(path="manifest.json"),
        listed(path=f"code/{'0' * 64}\n"),
        listed(size=0),
        listed(size=-1),
        listed(size=(1 << 30) + 1),
        listed(size="4"),
        listed(path=f"calls/{'0' * 64}", size=(16 << 20) + 1),
        listed(sha256="0" * 63),
        listed(more=1),
        [listed(), listed()],
        [listed(path=f"code/{n:064x}", size=1 << 30) for n in range(5)],
    ],
)
def test_a_manifest_names_nothing_but_small_files_of_its_folder(bench: Bench, file: Any) -> None:
    """Signed or not."""
    bench.write(contents(CALL))
    value = json.loads((bench.folder / folders.MANIFEST).read_text())
    value["files"] = file if isinstance(file, list) else [file]
    data = json.dumps(value).encode()
    (bench.folder / folders.MANIFEST).write_bytes(data)
    (bench.folder / folders.SIGNATURE).write_bytes(signing.sign(signing.read_private(bench.private), data))
    with pytest.raises(ConfigError, match=r"^export it again.*manifest\.json: (files|it: Value error)"):
        bench.take()
    assert bench.is_empty


def changed(call: ExportedCall, **fields: Any) -> bytes:
    return pack_body({**unpack_body(call.pack()), **fields})


def repacked(backend: ExportedBackend, **fields: Any) -> bytes:
    return json.dumps({**json.loads(backend.pack()), **fields}).encode()


OTHER = {"what": {**WHAT_OF, "env_hash": "env-2"}}
WRONG: dict[str, dict[str, bytes]] = {
    "a call of another environment": contents(ExportedCall(lifted(), OTHER["what"], CALL.trials)),
    "a call of another name": {**contents(CALL), f"calls/{'0' * 64}": CALL.pack()},
    "a call of another form": {**contents(CALL), f"calls/{CALL.key}": changed(CALL, form=b"\xc0")},
    "a call that is no map": {**contents(CALL), f"calls/{CALL.key}": pack_body([1])},
    "a call with more": {**contents(CALL), f"calls/{CALL.key}": changed(CALL, more=1)},
    "a call with other trials": {**contents(CALL), f"calls/{CALL.key}": changed(CALL, trials={"3": ["aa"]})},
    "a call that nobody has tried": contents(LIKE),
    "a call like none that was tried": contents(
        CALL, ExportedCall(lifted(5, OTHER_CODE), WHAT_OF), codes=(CODE, OTHER_CODE)
    ),
    "no calls": contents(codes=()),
    "no code": contents(CALL, codes=()),
    "more code": contents(CALL, codes=(CODE, OTHER_CODE)),
    "code of another name": {**contents(CALL, codes=()), f"code/{digest(CODE)}": OTHER_CODE},
    "no backend": {path: data for path, data in contents(CALL).items() if not path.startswith("backends")},
    "another backend, too": {**contents(CALL), "backends/two.json": BACKEND.pack()},
    "a descriptor of kernels of others": {
        **contents(CALL),
        "backends/one.json": repacked(
            BACKEND, descriptor={**DESCRIPTOR, "ops": {"silu": [{**KERNEL, "kernel_id": "torch.silu"}]}}
        ),
    },
    "a probe that failed": {
        **contents(CALL),
        "backends/one.json": repacked(BACKEND, record={**RECORD.to_json(), "ok": False}),
    },
    "a probe of another": {
        **contents(CALL),
        "backends/one.json": repacked(BACKEND, record={**RECORD.to_json(), "env": "two"}),
    },
    "times that are none": {
        **contents(CALL),
        "backends/one.json": repacked(BACKEND, times=[{**TIME.model_dump(), "median_us": 0.0}]),
    },
    "JSON that is none": {**contents(CALL), "backends/one.json": b"{"},
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_signed_and_wrong_is_refused_as_a_whole(bench: Bench, what: str) -> None:
    """A signature says whose it is, not that it is right."""
    bench.write(WRONG[what])
    with pytest.raises(ConfigError, match=r"^export it again"):
        bench.take()
    assert bench.is_empty


# --- interrupted


def test_an_import_that_was_killed_is_as_if_it_had_not_begun(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier import of that name serves on; what was left lying about goes with the next one."""
    bench.write(contents(CALL))
    bench.take()
    bench.folder.rename(bench.folder.with_name("before"))
    bench.write(contents(CALL, LIKE))
    context = multiprocessing.get_context("fork")
    for before in ("_take_over", "_imported", "json"):
        process = context.Process(target=_die_before, args=(bench, before))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        ((one,), problems) = bench.imports.all()
        assert ([call.key for call in one.calls_of("one")], problems) == ([CALL.key], [])
        one.specimen(one.calls[CALL.key])
    assert len(bench.take().calls_of("one")) == 2
    assert len(list((bench.imports.folder / "data").iterdir())) == 1


def _die_before(bench: Bench, step: str) -> None:
    class Killer:
        def __getattr__(self, _: str) -> Any:
            return die

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(imports_module, step, Killer() if step == "json" else die)
    bench.take()


def test_a_damaged_import_is_said_and_can_be_removed(bench: Bench) -> None:
    bench.write(contents(CALL))
    bench.take()
    ((one,), _) = bench.imports.all()
    (code,) = (next((bench.imports.folder / "data").iterdir()) / "code").iterdir()
    code.write_bytes(OTHER_CODE)
    with pytest.raises(Wrong, match=r"its bytes are not those that were imported"):
        one.specimen(one.calls[CALL.key])
    (bench.imports.folder / "a.json").write_text("{")
    found, (problem,) = bench.imports.all()
    assert found == []
    assert "lz lift remove a" in problem
    assert bench.imports.remove("a")
    assert bench.is_empty


# --- writing


def test_a_folder_appears_whole_or_not_at_all(bench: Bench) -> None:
    def broken() -> Iterator[tuple[str, bytes]]:
        yield "backends/one.json", BACKEND.pack()
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"^name another folder"):
        folders.write(bench.folder, broken(), None)
    assert [path.name for path in bench.folder.parent.iterdir() if "folder" in path.name] == []
    bench.write(contents(CALL))
    with pytest.raises(ConfigError, match=r"is no empty folder"):
        bench.write(contents(CALL))


def test_the_library_for_signatures_may_be_missing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.write(contents(CALL))
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(ConfigError, match=r"pip install 'layerzero-broker\[sign\]'"):
        bench.take()
