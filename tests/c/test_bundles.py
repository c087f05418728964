"""Bundles in C, under ASan and UBSan: the bits of Python's run, deaths on the way, and files that are no bundles."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.backends.toy import KILL, fault
from tests.c.conftest import Built, libzmq, run
from tests.process.harness import Site
from tests.process.test_bundles import with_env

import layerzero as lz
from layerzero.client.bundles import form
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.transport.plain import pack_body, unpack_body

W = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)
TRIES = 80


def model(x: Any, y: Any) -> Any:
    """A constant, an input that is read turned, a result that is used on the way, and one that lies otherwise."""
    h = lz.matmul(lz.silu(x), W)
    return {"h": h.T, "z": lz.matmul(h, lz.silu(y).T), "s": lz.silu(h)}


def drawn(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((5, 6), dtype=np.float32), rng.standard_normal((3, 4), dtype=np.float32)


@pytest.fixture
def written(connected: Site, tmp_path: Path) -> Path:
    """The bundle of `model`."""
    connected.wait_ready("alpha")
    plan, path = lz.plan(model), tmp_path / "model.lzb"
    while not (plan.phase == "FROZEN" and plan.explain().messages):
        plan(*drawn(0))
    lz.write_bundle(plan, path)
    return path


def called(built: Built, site: Site, mode: str, *paths: Path, stdin: bytes = b"") -> tuple[bytes, list[str]]:
    """What the C program writes, and the lines that it says."""
    done = run(built["bundles"], mode, site.folder, libzmq(), *paths, stdin=stdin)
    return done.stdout, done.stderr.decode().splitlines()


def given(*arrays: Any) -> bytes:
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def test_results_are_the_bits_of_python(built: Built, connected: Site, written: Path) -> None:
    """By the same kernels; and when a worker dies in the middle of a run, the next best kernel's, which are right."""
    bundle, inputs = lz.load_bundle(written), [drawn(seed) for seed in range(3)]
    expected = b"".join(given(*bundle(*both).values()) for both in inputs)
    x, y = drawn(3)
    y.flat[0] = fault(KILL, "alpha")  # the third of five steps
    stdin = b"".join(given(*both) for both in [*inputs, (x, y), inputs[0]])
    out, lines = called(built, connected, "run", written, stdin=stdin)
    assert lines[0] == "model x y h z s by alpha"
    alone = [f"alpha.{op}/0" for op in ("silu", "matmul", "silu", "matmul", "silu")]
    assert [line.split() for line in lines[1:4]] == [alone] * 3
    killed = lines[4].split()
    assert killed[:2] == alone[:2]
    assert killed[2] in ("beta.silu/1", "gamma.silu/1")
    nbytes = len(expected) // 3
    assert out[: len(expected)] == expected
    assert out[-nbytes:] == expected[:nbytes]
    found = np.frombuffer(out[3 * nbytes : 4 * nbytes], np.float32)
    h, z, s = found[:20].reshape(4, 5).T, found[20:35].reshape(5, 3), found[35:].reshape(5, 4)
    np.testing.assert_allclose(h, x / (1 + np.exp(-x)) @ W, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(z[:, 1:], h @ (y[1:] / (1 + np.exp(-y[1:]))).T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(s, h / (1 + np.exp(-h)), rtol=1e-4, atol=1e-5)


def changed(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def test_what_is_no_bundle_says_what_to_do(built: Built, connected: Site, written: Path) -> None:
    """Each part that has other bytes, files that are cut or longer, another format, another lock."""
    raw, parts = written.read_bytes(), form.read(written).manifest.parts
    end = {part.name: part.offset + part.nbytes - 1 for part in parts}
    again = "INVALID_ARGUMENT|Write the bundle again, or copy it again: "
    name = "INVALID_ARGUMENT|Name a file that lz.write_bundle or `lz bundle write` has written."
    sha = "it has other bytes than its SHA-256 says"
    wrong: list[tuple[bytes, str, str]] = [
        (changed(raw, 60), again, f"Its manifest: {sha}"),
        *((changed(raw, at), again, f"Its {part}: {sha}") for part, at in end.items()),
        (raw[:-1], again, "Its end: the file ends elsewhere than its last part"),
        (raw + b"\0", again, "Its end: the file ends elsewhere than its last part"),
        (raw[:100], again, f"Its manifest: {sha}"),
        (raw[:20], name, "is no bundle"),
        (b"", name, "is no bundle"),
        (raw[:8] + b"\2" + raw[9:], "VERSION_MISMATCH|Write the bundle again with this version", "has format 2"),
    ]
    paths = [written.with_name(f"{number}.lzb") for number in range(len(wrong))]
    for path, (data, _, _) in zip(paths, wrong, strict=True):
        path.write_bytes(data)
    assert set(end) == {"plan", "lock/alpha", "constants"} or set(end) == {"plan", "constants"}
    others = [with_env(written, "0123456789abcdef"), with_env(written, "", "alpha.gone")]
    others += [written.parent, written.with_name("none"), written]
    out, _ = called(built, connected, "open", *paths, *others)
    lines = out.decode().splitlines()
    said = [*zip(lines[::2], lines[1::2], strict=True)]
    for (first, second), (_, advice, why) in zip(said, wrong, strict=False):
        assert first.startswith(advice)
        assert why in second
    lock, kernel, folder, nothing, right = said[len(wrong) :]
    show = f"lz bundle show {others[0]} --lock alpha"
    assert lock[0] == f"ENV_CHANGED|Have alpha locked as the bundle has it ({show}), or set any_lock."
    assert "with its environment 0123456789abcdef, here it is " in lock[1]
    assert kernel[0] == "ENV_CHANGED|Write the bundle again, or set any_lock."
    assert kernel[1].endswith("needs alpha.gone, which is not here")
    assert (folder[0], nothing[0]) == (name, name)
    assert right[0].startswith("OK|")


WRONG = {
    "no client": "NOT_CONNECTED|Connect first",
    "no path": "INVALID_ARGUMENT|Name the file of the bundle",
    "options": "INVALID_ARGUMENT|Set struct_size of lz_bundle_options",
    "no bundle": "INVALID_ARGUMENT|Open a bundle first",
    "no run": "INVALID_ARGUMENT|Set struct_size of lz_bundle_run_spec",
    "count": "INVALID_ARGUMENT|Give the run 2 inputs",
    "shape": "INVALID_ARGUMENT|Give input 1, y, the dtype and shape that lz_bundle_about tells",
    "strides": "INVALID_ARGUMENT|Give input 1, y, the dtype and shape that lz_bundle_about tells, in row-major order",
    "dtype": "INVALID_ARGUMENT|Give input 1, y, the dtype",
    "memory": "INVALID_ARGUMENT|Put input 1, y, into memory of lz_alloc",
    "overlap": "INVALID_ARGUMENT|Give output 0, h, memory of its own: it overlaps input 0",
    "time": "INVALID_ARGUMENT|Give timeout_s in seconds",
}


def test_wrong_arguments_say_what_to_do(built: Built, connected: Site, written: Path) -> None:
    """And the bundle goes on, by several threads."""
    out, _ = called(built, connected, "wrong", written)
    said = dict(line.split("|", 1) for line in out.decode().splitlines())
    assert said.keys() == WRONG.keys()
    assert [name for name, text in said.items() if not text.startswith(WRONG[name])] == []


def rewritten(raw: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The same file with another plan, whose hash is right."""
    nbytes = int.from_bytes(raw[12:16], "little")
    value = unpack_body(raw[48 : 48 + nbytes])
    parts = {row[0]: raw[row[1] : row[1] + row[2]] for row in value["parts"]}
    parts["plan"] = change(parts["plan"])
    packed, size = b"", -1
    while len(packed) != size:
        size, at = len(packed), 48 + len(packed)
        for row in value["parts"]:
            row[1], row[2] = -(-at // 64) * 64, len(parts[row[0]])
            row[3] = form.part_digest([memoryview(parts[row[0]])])
            at = row[1] + row[2]
        packed = pack_body(value)
    out = bytearray(form.head_of(packed) + packed)
    for row in value["parts"]:
        out += bytes(row[1] - len(out)) + parts[row[0]]
    return bytes(out)


def with_another_value(rng: random.Random) -> Callable[[bytes], bytes]:
    others: list[Any] = [None, True, -1, 0, 1, 2, 5, 63, 64, 1 << 31, 1 << 46, 1 << 62, 0.5, "", "slot", b"", [], [[]]]

    def change(plan: bytes) -> bytes:
        if rng.random() < 0.2:
            return changed(plan, rng.randrange(len(plan)))
        at = value = unpack_body(plan)
        while True:
            key = rng.choice([*at] if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], (dict, list)) or not at[key] or rng.random() < 0.1:
                break
            at = at[key]
        at[key] = rng.choice(others)
        return pack_body(value)

    return change


def test_changed_plans_stay_in_their_memory(built: Built, connected: Site, written: Path) -> None:
    """Whatever is in a plan: it is refused, or it runs without touching anything else, or its calls are refused. What
    Python takes, C takes."""
    raw, paths, taken = written.read_bytes(), [], []
    for seed in range(TRIES):
        path = written.with_name(f"{seed}.lzb")
        path.write_bytes(rewritten(raw, with_another_value(random.Random(seed))))
        paths.append(path)
        try:
            form.read(path)
        except LayerZeroError:
            continue
        taken.append(seed)
    out, _ = called(built, connected, "try", *paths)
    said = out.decode().splitlines()
    assert len(said) == TRIES
    assert [seed for seed in taken if said[seed] != "OK"] == []
    assert 4 < said.count("INVALID_ARGUMENT") < TRIES
