"""What a bundle is: one file with a straight line of calls, their constants, and what they were made with. Data of
anybody's: no code, each part with its SHA-256, and each number in it checked. docs/bundles.md has the format, which the
C library reads as well (c/src/bundle_file.c)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from layerzero.ipc.errors import InvalidArgument, LayerZeroError, ProtocolError, VersionMismatch
from layerzero.ipc.transport.plain import pack_body, unpack_body
from layerzero.ipc.vocabulary.ops import OPS
from layerzero.ipc.vocabulary.tensors import MAX_NBYTES, TensorSpec

MAGIC, FORMAT = b"LZBUNDLE", 1
HEAD_BYTES = 48  # MAGIC, FORMAT and the manifest's bytes as 4 bytes each, the least first, the manifest's SHA-256
ALIGNMENT = 64  # of each part's place in the file, and of places in memory
MAX_MANIFEST_BYTES, MAX_PLAN_BYTES, MAX_LOCK_BYTES = 1 << 20, 16 << 20, 1 << 20
MAX_PARTS, MAX_CALLS, MAX_KERNELS, MAX_TENSORS, MAX_OF_CALLER = 66, 4096, 1024, 1 << 16, 64
MAX_TEXT = 400
PLAN, CONSTANTS, LOCK = "plan", "constants", "lock/"
PLANS = "bundle_plan", "bundle_gpu_plan"  # on the CPU, on a GPU; what runs the one alone refuses the other
INPUT, OUTPUT, SLOT, CONSTANT = "input", "output", "slot", "constant"
_PIECE = 1 << 20
_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Part:
    """Bytes of the file."""

    name: str
    offset: int
    nbytes: int
    sha256: bytes


@dataclass(frozen=True)
class Environment:
    """What the calls of a backend ran in: `env` is the id of its lock and interpreter."""

    backend: str
    env: str


@dataclass(frozen=True)
class Manifest:
    """`name`: of the function; `made_by`: the version of LayerZero; `made_s`: seconds since 1970."""

    name: str
    made_by: str
    made_s: float
    environments: tuple[Environment, ...]
    parts: tuple[Part, ...]

    def part(self, name: str) -> Part | None:
        return next((part for part in self.parts if part.name == name), None)


@dataclass(frozen=True)
class Home:
    """Memory: the caller's INPUT or OUTPUT number `place`, or bytes from `place` on of all SLOTs or CONSTANTs."""

    kind: str
    place: int
    nbytes: int


@dataclass(frozen=True)
class Tensor:
    """`offset`: of its first byte in its home."""

    home: int
    offset: int
    spec: TensorSpec


@dataclass(frozen=True)
class Step:
    """A call in canonical form (ipc/vocabulary/ops.py), by numbers of tensors. `outputs` as the worker writes them,
    `results` the same bytes in row-major order; `backend`, `kernel` and `us` are what it was made with, `where` is the
    line of the function that made it. `is_pinned`: it named its backend. `asked`, `arguments` and `params`: the public
    op, its tensors and its other values, of which the canonical form comes."""

    op: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    results: tuple[int, ...]
    attrs: Mapping[str, Any]
    backend: str
    kernel: str
    is_pinned: bool
    us: float
    where: str
    asked: str
    arguments: tuple[int | None, ...]
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Content:
    """`inputs` and `outputs`: names and tensors, in order; `result`: lists, maps and plain values, with {"output": N}
    in place of arrays. `slot_bytes`, `constant_bytes`: of all together. `is_on_gpu`: its arrays are on one GPU."""

    homes: tuple[Home, ...]
    tensors: tuple[Tensor, ...]
    steps: tuple[Step, ...]
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    result: Any
    slot_bytes: int
    constant_bytes: int
    is_on_gpu: bool = False

    def is_direct(self, number: int) -> bool:
        """Whether an output is written where the caller wants it; else it is copied there at the end."""
        return self.homes[self.tensors[self.outputs[number][1]].home].kind == OUTPUT


@dataclass(frozen=True)
class BundleFile:
    """A bundle as it lies on disk, all but its constants read and compared."""

    path: Path
    manifest: Manifest
    content: Content
    locks: Mapping[str, str]  # by backend

    def constants(self, room: memoryview) -> None:
        """Read the constants. Raises InvalidArgument where they are not what was written."""
        part = self.manifest.part(CONSTANTS)
        if part is None:
            return
        with _reading(self.path) as stream:
            stream.seek(part.offset)
            digest, at = hashlib.sha256(), 0
            while at < part.nbytes:
                piece = room[at : min(at + _PIECE, part.nbytes)]
                if (got := stream.readinto(piece)) != len(piece):  # type: ignore[attr-defined]
                    raise _damaged(self.path, f"{CONSTANTS} ends after {at + (got or 0)} of {part.nbytes} bytes")
                digest.update(piece)
                at += len(piece)
        if digest.digest() != part.sha256:
            raise _damaged(self.path, f"{CONSTANTS} has other bytes than its SHA-256 says")


# --- writing


def write(
    path: Path,
    name: str,
    made_by: str,
    made_s: float,
    content: Content,
    envs: Mapping[str, tuple[str, str]],
    constants: Sequence[memoryview],
) -> None:
    """Write a file and put it in place. `envs`: the id and lock of each backend; `constants`: bytes that follow each
    other. Raises InvalidArgument for what no reader would take, and for a place that cannot be written."""
    plan = pack_body(content_to_wire(content))
    content_of_wire(unpack_body(plan))
    parts = [(PLAN, [memoryview(plan)])]
    parts += [(LOCK + one, [memoryview(text.encode())]) for one, (_, text) in envs.items() if text]
    if content.constant_bytes:
        parts.append((CONSTANTS, list(constants)))
    sizes, digests = [sum(map(len, pieces)) for _, pieces in parts], [part_digest(pieces) for _, pieces in parts]
    environments = [[backend, env] for backend, (env, _) in envs.items()]
    value = {"kind": "bundle", "name": name, "made_by": made_by, "made_s": made_s, "environments": environments}
    packed, offsets = b"", list[int]()
    while True:  # offsets lie behind the manifest, whose size depends on their digits
        at, before = HEAD_BYTES + len(packed), packed
        offsets = []
        for nbytes in sizes:
            offsets.append(_aligned(at))
            at = offsets[-1] + nbytes
        rows = zip(parts, offsets, sizes, digests, strict=True)
        packed = pack_body({**value, "parts": [[one, at, nbytes, sha] for (one, _), at, nbytes, sha in rows]})
        if len(packed) == len(before):
            break
    manifest_of_wire(unpack_body(packed), len(packed))
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "xb") as stream:
            stream.write(head_of(packed) + packed)
            for offset, (_, pieces) in zip(offsets, parts, strict=True):
                stream.write(bytes(offset - stream.tell()))
                for piece in pieces:
                    stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    except OSError as exc:
        raise InvalidArgument(f"name a file that can be written: {path}: {exc.strerror}") from exc
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def head_of(manifest: bytes) -> bytes:
    """The bytes before it."""
    numbers = FORMAT.to_bytes(4, "little") + len(manifest).to_bytes(4, "little")
    return MAGIC + numbers + hashlib.sha256(manifest).digest()


def part_digest(pieces: Iterable[memoryview]) -> bytes:
    """The SHA-256 of a part."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# --- reading


def read(path: Path) -> BundleFile:
    """Read a bundle without its constants. Raises InvalidArgument for what is none, or is damaged, VersionMismatch for
    one of another format."""
    with _reading(path) as stream:
        nbytes = os.fstat(stream.fileno()).st_size
        manifest = _manifest(path, stream)
        texts = {}
        for part in manifest.parts:
            if part.offset + part.nbytes > nbytes:
                raise _damaged(path, f"{part.name} passes the file's end")
            if part.name != CONSTANTS:
                stream.seek(part.offset)
                texts[part.name] = data = stream.read(part.nbytes)
                if hashlib.sha256(data).digest() != part.sha256:
                    raise _damaged(path, f"{part.name} has other bytes than its SHA-256 says")
        last = manifest.parts[-1]
        if nbytes != last.offset + last.nbytes:
            raise _damaged(path, "it has bytes behind its last part")
    content = _checked(path, lambda: content_of_wire(unpack_body(texts[PLAN])))
    kept = manifest.part(CONSTANTS)
    if content.constant_bytes != (0 if kept is None else kept.nbytes):
        raise _damaged(path, "its plan takes other constants than it has")
    locks = {name.removeprefix(LOCK): text.decode(errors="replace") for name, text in texts.items() if name != PLAN}
    return BundleFile(path, manifest, content, locks)


def verify(path: Path) -> BundleFile:
    """As `read`, and look at every byte."""
    found = read(path)
    found.constants(memoryview(bytearray(found.content.constant_bytes)))
    return found


def _reading(path: Path) -> BinaryIO:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb")
    except OSError as exc:
        raise InvalidArgument(f"name a file that lz.write_bundle has written: {path}: {exc.strerror}") from exc


def _manifest(path: Path, stream: BinaryIO) -> Manifest:
    head = stream.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES or not head.startswith(MAGIC):
        raise InvalidArgument(f"name a file that lz.write_bundle has written: {path} is no bundle")
    number, nbytes = int.from_bytes(head[8:12], "little"), int.from_bytes(head[12:16], "little")
    if number != FORMAT:
        raise VersionMismatch(
            f"write the bundle again with this version, or read it with that of its writer: {path} has format "
            f"{number}, this version reads {FORMAT}"
        )
    packed = stream.read(min(nbytes, MAX_MANIFEST_BYTES))
    if len(packed) != nbytes or hashlib.sha256(packed).digest() != head[16:]:
        raise _damaged(path, "its manifest has other bytes than its SHA-256 says")
    found: Manifest = _checked(path, lambda: manifest_of_wire(unpack_body(packed), nbytes))
    return found


def _checked(path: Path, make: Any) -> Any:
    try:
        return make()
    except (ProtocolError, InvalidArgument) as exc:
        raise _damaged(path, exc.message) from exc


def _damaged(path: Path, why: str) -> InvalidArgument:
    return InvalidArgument(f"write the bundle again, or copy it again: {path} is damaged: {why}")


# --- plain values


def manifest_of_wire(value: Any, nbytes: int) -> Manifest:
    """`nbytes`: of the manifest. Raises InvalidArgument."""
    try:
        if value["kind"] != "bundle":
            raise ValueError("another kind of manifest")
        parts = tuple(Part(_text(n), _count(at), _count(size), _digest(sha)) for n, at, size, sha in value["parts"])
        environments = tuple(Environment(_name(backend), _name(env)) for backend, env in value["environments"])
        found = Manifest(_text(value["name"]), _text(value["made_by"]), _number(value["made_s"]), environments, parts)
    except (ValueError, KeyError, TypeError) as exc:
        raise InvalidArgument(f"its manifest: {exc!s:.200}") from exc
    names = [part.name for part in parts]
    most = {PLAN: MAX_PLAN_BYTES, CONSTANTS: MAX_NBYTES}
    at = HEAD_BYTES + nbytes
    for part in parts:
        if part.offset != _aligned(at) or part.nbytes > most.get(part.name, MAX_LOCK_BYTES):
            raise InvalidArgument(f"its manifest: {part.name} does not lie behind the part before it, or is too large")
        at = part.offset + part.nbytes
    are_known = all(n in most or (n.startswith(LOCK) and n.removeprefix(LOCK)) for n in names)
    if not are_known or len(set(names)) != len(names) or PLAN not in names or not 1 <= len(names) <= MAX_PARTS:
        raise InvalidArgument(f"its manifest: its parts are {', '.join(names)!r:.200}")
    return found


def content_to_wire(content: Content) -> dict[str, Any]:
    """Plain values."""
    return {
        "kind": PLANS[content.is_on_gpu],
        "homes": [[home.kind, home.place, home.nbytes] for home in content.homes],
        "tensors": [[one.home, one.offset, *one.spec.to_wire()] for one in content.tensors],
        "inputs": [list(one) for one in content.inputs],
        "outputs": [list(one) for one in content.outputs],
        "result": content.result,
        "steps": [
            [
                step.op,
                list(step.inputs),
                list(step.outputs),
                list(step.results),
                dict(step.attrs),
                step.backend,
                step.kernel,
                step.is_pinned,
                step.us,
                step.where,
                step.asked,
                list(step.arguments),
                dict(step.params),
            ]
            for step in content.steps
        ],
        "slot_bytes": content.slot_bytes,
        "constant_bytes": content.constant_bytes,
    }


def content_of_wire(value: Any) -> Content:
    """What was packed, every number of it checked. Raises InvalidArgument."""
    try:
        if value["kind"] not in PLANS:
            raise ValueError("another kind of plan")
        homes = tuple(Home(_text(kind), _count(place), _count(size)) for kind, place, size in value["homes"])
        tensors = tuple(
            Tensor(_count(home), _count(offset), TensorSpec.from_wire(spec)) for home, offset, *spec in value["tensors"]
        )
        named = [tuple((_text(name), _count(n)) for name, n in value[which]) for which in ("inputs", "outputs")]
        sizes = _count(value["slot_bytes"]), _count(value["constant_bytes"])
        steps = tuple(_step(one) for one in value["steps"])
        content = Content(
            homes, tensors, steps, named[0], named[1], value["result"], *sizes, value["kind"] == PLANS[True]
        )
        _check(content)
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        message = exc.message if isinstance(exc, LayerZeroError) else str(exc)
        raise InvalidArgument(f"its plan: {message:.300}") from exc
    return content


def _step(row: Any) -> Step:
    op, inputs, outputs, results, attrs, backend, kernel, is_pinned, us, where, asked, arguments, params = row
    for name in (op, asked):
        if type(name) is not str or name not in OPS:
            raise ValueError(f"no op is called {name!r:.40}; a newer version may have it")
    if not isinstance(attrs, dict) or any(type(one) not in _SCALARS for one in attrs.values()):
        raise ValueError(f"attributes of {op} are no plain values")
    if not isinstance(params, dict) or type(is_pinned) is not bool or len(arguments) != len(OPS[asked].inputs):
        raise ValueError(f"{asked} is asked for otherwise")
    made = tuple(map(_count, outputs)), tuple(map(_count, results))
    ran, taken = (_name(backend), _name(kernel)), _counts(arguments)
    return Step(op, _counts(inputs), *made, attrs, *ran, is_pinned, _number(us), _text(where), asked, taken, params)


def _counts(numbers: Any) -> tuple[int | None, ...]:
    return tuple(None if n is None else _count(n) for n in numbers)


def _check(content: Content) -> None:
    """Raises ValueError and IndexError for a plan that would not stay in its memory, or read what nothing wrote."""
    counts = (len(content.homes), len(content.tensors)), (len(content.inputs), len(content.outputs))
    if max(counts[0]) > MAX_TENSORS or max(counts[1]) > MAX_OF_CALLER or not 1 <= len(content.steps) <= MAX_CALLS:
        raise ValueError("it has too many steps or tensors, or none")
    if len({step.kernel for step in content.steps}) > MAX_KERNELS:
        raise ValueError("it has too many kernels")
    ends = {SLOT: content.slot_bytes, CONSTANT: content.constant_bytes}
    for home in content.homes:
        of_caller = {INPUT: content.inputs, OUTPUT: content.outputs}.get(home.kind)
        is_inside = (
            home.place < len(of_caller) if of_caller is not None else home.place + home.nbytes <= ends[home.kind]
        )
        if not is_inside or not 0 < home.nbytes <= MAX_NBYTES or (of_caller is None and home.place % ALIGNMENT):
            raise ValueError(f"memory of kind {home.kind} lies outside of what there is")
    for tensor in content.tensors:
        if tensor.offset + tensor.spec.span_bytes > content.homes[tensor.home].nbytes or not tensor.spec.numel:
            raise ValueError("a tensor lies outside of its memory")
    written = {number for number, home in enumerate(content.homes) if home.kind in (INPUT, CONSTANT)}
    for kind, named in ((INPUT, content.inputs), (OUTPUT, content.outputs)):
        for place, (_, number) in enumerate(named):
            home = content.homes[content.tensors[number].home]
            is_whole = _is_whole(content, number) and (home.kind, home.place) == (kind, place)
            if not is_whole and (kind == INPUT or home.kind != SLOT):
                raise ValueError(f"{kind} {place} is not its memory")
    for step in content.steps:
        if not len(step.outputs) == len(step.results) >= 1 or len(step.inputs) + len(step.outputs) > MAX_OF_CALLER:
            raise ValueError(f"{step.op} has too many tensors, or no results")
        if any(content.tensors[n].home not in written for n in (*step.inputs, *step.arguments) if n is not None):
            raise ValueError(f"{step.op} reads what nothing has written")
        for made, result in zip(step.outputs, step.results, strict=True):
            target = content.tensors[made].home
            if content.homes[target].kind not in (OUTPUT, SLOT) or not _is_same(content, made, result):
                raise ValueError(f"{step.op} writes to what is not its own")
            written.add(target)
    if any(content.tensors[number].home not in written for _, number in content.outputs):
        raise ValueError("an output that nothing has written")


def _is_whole(content: Content, number: int) -> bool:
    tensor = content.tensors[number]
    nbytes = content.homes[tensor.home].nbytes
    return tensor.spec.is_contiguous and not tensor.offset and tensor.spec.span_bytes == nbytes


def _is_same(content: Content, made: int, result: int) -> bool:
    """The same bytes, row-major in their home as the caller sees them."""
    one, other = content.tensors[made], content.tensors[result]
    return (
        one.home == other.home
        and one.offset == other.offset == 0
        and one.spec.dtype == other.spec.dtype
        and one.spec.span_bytes == other.spec.span_bytes
        and other.spec.is_contiguous
    )


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise ValueError(f"{value!r:.40} is no text of at most {MAX_TEXT} characters")
    return value


def _name(value: Any) -> str:
    if not _text(value).isascii():
        raise ValueError(f"{value!r:.40} is no name")
    return str(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 2 * MAX_NBYTES:
        raise ValueError(f"{value!r:.40} is no number of bytes or things")
    return value


def _number(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r:.40} is no time")
    return value


def _digest(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != hashlib.sha256().digest_size:
        raise ValueError("no SHA-256")
    return value
