"""The call of a capsule of a function once more, in its environment and in others: from what crossed then, without the
program that called."""

from __future__ import annotations

import ast
import copy
import ctypes
import hashlib
import logging
import os
import re
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from layerzero.client.arrays.recognition import CPU, describe
from layerzero.client.capsules import of_function
from layerzero.client.capsules.form import ALIGNMENTS, CUDA, Capsule, Segment
from layerzero.client.capsules.of_function import FunctionCall, Part
from layerzero.client.connection import arena as arenas
from layerzero.client.gpu.lent import GpuArguments, GpuLoan
from layerzero.client.gpu.lent_calls import lend
from layerzero.client.gpu.own_arrays import GpuArray
from layerzero.client.tools.debugger import Runs
from layerzero.client.tools.inputs import random_inputs
from layerzero.client.tools.replay import START_S, Outcome, on_host, own_broker, where, why_of
from layerzero.envs import functions as environments
from layerzero.functions.agreement import difference
from layerzero.functions.calling import Exchange, all_lent
from layerzero.functions.code import root_of
from layerzero.functions.ranges import MAX_LENT, Place
from layerzero.ipc.errors import EnvError, InvalidArgument, LayerZeroError, RemoteError
from layerzero.ipc.functions import frames
from layerzero.ipc.functions.frames import Code, Frame, Payload, Reference
from layerzero.ipc.transport.plain import unpack_tree
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.tensors import TensorSpec

UNREADABLE = "its result cannot be read here"  # of a call that has run (functions/calling.py)
TOLERANCE = 1e-5
COPIES = 3  # of arrays of random numbers, at the most: here, as they are told, and as they are lent
_LIBRARIES, _PACKAGES = frozenset({"lib", "lib64"}), frozenset({"site-packages", "dist-packages"})
_OF_PYTHON = re.compile(r"(python|pypy)[0-9]+(\.[0-9]+)*t?")
_HOW = {
    of_function.METHOD: frames.METHOD,
    of_function.GET: frames.GET,
    of_function.SET: frames.SET,
    of_function.ITSELF: frames.ITSELF,
}
Memory = tuple[list[Any], bytes, list[tuple[bytes, int]]]
"""Trees of the arguments, the bytes beside them, and what was lent, with its address modulo ALIGNMENTS."""


def replay(
    capsule: Capsule,
    data: Sequence[bytes],
    *,
    backends: Sequence[str] | None = (),
    times: int = 1,
    timeout_s: float | None = None,
    seed: int = 0,
    begins: Callable[[str], None] = lambda _: None,
    file: Path | None = None,
    is_trusted: bool = False,
    device: str = "",
    variables: Mapping[str, str] = MappingProxyType({}),
) -> list[Outcome]:
    """Make the call in each of the environments, by their names; none: in the one that failed; None: in all that are
    built here. `file`: where the function's file is, in the place of where it was. `is_trusted`: the capsule is this
    user's own, or what it names may be called (`code_to_call`). Results are compared with those of
    the first environment that gave one; of a capsule of a wrong result, with those that it was compared with. `device`:
    where arrays are that were on a GPU; there, when left out.

    Needs NumPy. Raises InvalidArgument for a call that cannot be made again, and where the file is not the one that it
    was of; EnvError for an environment that is not built."""
    function, ordinal = _again(capsule), place_of(capsule, device)
    told = function_memory(capsule, data, seed)
    own = [function.targets[0].env, *([capsule.served_by] if capsule.failed.outcome == "WRONG" else [])]
    store = environments.default_store(os.environ)
    named = [environments.full_name(pools.environment_of(one), store) for one in backends or own]
    names = list(dict.fromkeys(named)) if backends is not None else environments.all_built(store)
    codes = {name: code_to_call(function, name, file, told, is_trusted=is_trusted) for name in names}
    tolerance = capsule.params.get("tolerance")
    allowed = float(tolerance) if isinstance(tolerance, (int, float)) else TOLERANCE
    found: dict[str, Outcome] = {}
    reference: list[Any] = []
    with own_broker(**variables) as session:
        for name in sorted(names, key=lambda one: one != pools.environment_of(capsule.served_by)):
            begins(name)
            outcome = found[name] = Outcome(name)
            learn(session, name)
            first: list[Any] = []
            for number in range(times):
                within_s = timeout_s if number else timeout_s or START_S
                try:
                    value = run(session, function, codes[name], name, told, within_s, ordinal)
                except LayerZeroError as exc:
                    outcome.note(*why(exc))
                    continue
                outcome.note("ok")
                if first:
                    outcome.is_same = outcome.is_same and not difference(value, first[0], 0.0)
                first = first or [value]
                if reference:
                    outcome.difference = outcome.difference or difference(value, reference[0], allowed)
            reference = reference or first
    return [found[name] for name in names]


def place_of(capsule: Capsule, device: str) -> int:
    """The ordinal of the GPU that arrays are on which were on one; CPU. Raises InvalidArgument."""
    if device and capsule.device != CUDA:
        raise InvalidArgument(f"leave --device out: the arguments of {capsule.name} were not on a GPU")
    return where(capsule, device)


def runs_of(
    capsule: Capsule,
    data: Sequence[bytes],
    backend: str,
    seed: int,
    file: Path | None,
    *,
    is_trusted: bool = False,
    device: str = "",
) -> Callable[[Any], Runs]:
    """For a debugger: the call in one environment, for a session. Raises as `replay`."""
    function = _again(capsule)
    name, code, told = to_call(capsule, data, backend, seed, file, is_trusted=is_trusted)
    ordinal = place_of(capsule, device)

    def runs(session: Any) -> Runs:
        learn(session, name)
        return Runs(name, lambda timeout_s: run(session, function, code, name, told, timeout_s, ordinal))

    return runs


def to_call(
    capsule: Capsule, data: Sequence[bytes], backend: str, seed: int, file: Path | None, *, is_trusted: bool
) -> tuple[str, Code, list[Memory]]:
    """The environment's whole name, what is called there, and with what. Raises as `replay`."""
    name = environments.full_name(pools.environment_of(backend), environments.default_store(os.environ))
    function, told = _again(capsule), function_memory(capsule, data, seed)
    return name, code_to_call(function, name, file, told, is_trusted=is_trusted), told


def _again(capsule: Capsule) -> FunctionCall:
    function = capsule.function
    assert function is not None
    if function.problem:
        raise InvalidArgument(
            f"{capsule.name} shows what is known of the call, which cannot be made: {function.problem}"
        )
    return function


def function_memory(capsule: Capsule, data: Sequence[bytes], seed: int) -> list[Memory]:
    """What each part of the call takes along: as it was kept, or arrays of random numbers. Raises InvalidArgument where
    texts or bytes are missing that were not kept."""
    function = _again(capsule)
    if not data and not all(part.is_whole for part in function.parts):
        raise InvalidArgument(
            "let it fail again with LAYERZERO_CAPSULES=small: texts and bytes among the arguments were not kept "
            f"({capsule.left_out}), and none stand for them"
        )
    return [_memory(part, capsule.segments, data, seed) for part in function.parts]


def _memory(part: Part, segments: Sequence[Segment], data: Sequence[bytes], seed: int) -> Memory:
    trees_at, payload_at, *lent_at = part.memory
    offsets = [segments[n].offset for n in lent_at]
    if len(lent_at) > MAX_LENT:
        raise InvalidArgument(f"the capsule is damaged: {len(lent_at)} ranges of memory; a call lends {MAX_LENT}")
    if data:
        trees = _trees(part, data[trees_at], [len(data[n]) for n in (payload_at, *lent_at)])
        return trees, data[payload_at], list(zip([data[n] for n in lent_at], offsets, strict=True))
    trees = [of_function.tree_of(one) for one in part.given]
    sizes = [segments[n].nbytes for n in (payload_at, *lent_at)]
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if COPIES * sum(sizes) > room:
        raise InvalidArgument(
            f"replay it on a machine with more memory: its arguments have {sum(sizes):,} bytes, of which "
            f"{COPIES} copies are made, and this one has {room:,}"
        )
    memories = [bytearray(size) for size in sizes]
    for number, node in enumerate(of_function.arrays(trees)):
        spec = of_function.spec_of(node)
        if not spec.numel:
            continue
        made = random_inputs("silu", {"x": spec}, seed + number)["x"]
        memory, start = memories[node[4] + 1], node[5]
        memory[start : start + spec.span_bytes] = ctypes.string_at(made.ctypes.data, spec.span_bytes)
    return trees, bytes(memories[0]), list(zip(map(bytes, memories[1:]), offsets, strict=True))


def _trees(part: Part, data: bytes, sizes: Sequence[int]) -> list[Any]:
    """Arguments as they crossed. Raises InvalidArgument for what are none."""
    try:
        trees = unpack_tree(data)
        args, kwargs = trees
        if type(args) is not list or type(kwargs) is not list:
            raise ValueError("no arguments")
        of_function.demand_inside(part, trees, sizes)
    except LayerZeroError as exc:
        raise InvalidArgument(f"the capsule is damaged: {exc.message}") from exc
    except (ValueError, TypeError) as exc:
        raise InvalidArgument(f"the capsule is damaged: {exc!s:.200}") from exc
    return [args, kwargs]


def code_to_call(
    function: FunctionCall, env: str, file: Path | None, told: Sequence[Memory], *, is_trusted: bool
) -> Code:
    """As `code_of`, for a call. The capsule itself says which file, with which hash, and which arguments: where it is
    not trusted all that is shown first, and the user has to name the file. Raises InvalidArgument."""
    code = code_of(function, env, file)
    if is_trusted:
        return code
    shown = f"{_calls(function, code, told)}, in {env}"
    if file is None or code.is_installed:
        by = "say --trust" if code.is_installed else "name its file by --file FILE, or say --trust"
        raise InvalidArgument(
            f"look at what this capsule calls, then {by}: it is not one of your own, and calls {shown}"
        )
    if code.qualname.partition(".")[0] not in _defined(Path(code.file)):
        raise InvalidArgument(f"say --trust if you mean it: {code.file} does not define what it calls: {shown}")
    return code


def _calls(function: FunctionCall, code: Code, told: Sequence[Memory]) -> str:
    """What will be called, by what crosses: what the capsule says of it may be something else."""
    said = []
    for part, (trees, _, _) in zip(function.parts, told, strict=True):
        name = f".{part.name}" if part.name else ""
        said.append(f"{code.label}{name}({of_function.words_of(*trees)})")
    where = f"{code.file} (SHA-256 {code.sha256[:12]}...)" if code.file else "a package of the environment"
    return f"{', then '.join(said)} of {where}"


def _defined(file: Path) -> set[str]:
    """The functions and classes that a file has of its own."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as exc:
        raise InvalidArgument(f"name a Python file by --file FILE: {file}: {exc!s:.200}") from exc
    return {
        one.name for one in ast.walk(tree) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }


def _is_of_interpreter(file: str) -> bool:
    """Whether a file is of the standard library of any interpreter. Site-packages are not."""
    for path in {Path(os.path.abspath(file)), Path(file).resolve()}:
        own = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
        below = [path.relative_to(one).parts for one in own if path.is_relative_to(one)]
        below += [
            path.parts[n + 2 :]
            for n, (above, name) in enumerate(pairwise(path.parts))
            if above in _LIBRARIES and _OF_PYTHON.fullmatch(name)
        ]
        if any(_PACKAGES.isdisjoint(parts[:-1]) for parts in below):
            return True
    return False


def code_of(function: FunctionCall, env: str, file: Path | None) -> Code:
    """What is called in an environment. Raises InvalidArgument where that file is not here, is another by now, or is
    the standard library's."""
    target = next((one for one in function.targets if one.env == env), function.targets[0])
    code = target.code
    if file is not None and not code.is_installed:
        path = file.resolve()
        code = replace(code, file=str(path), root=root_of(code.module, path, code.is_main))
    if code.is_installed:
        return code
    if _is_of_interpreter(code.file):
        raise InvalidArgument(
            f"write a function of your own: {code.label} is of {code.file}, a file of an interpreter's standard "
            "library, which is never called from afar"
        )
    try:
        sha256 = hashlib.sha256(Path(code.file).read_bytes()).hexdigest()
    except OSError as exc:
        sha256, said = "", exc.strerror or str(exc)
    else:
        said = f"its SHA-256 begins with {sha256[:12]} now"
    if sha256 != code.sha256:
        raise InvalidArgument(
            f"name the file with {code.label} as it was, of SHA-256 {code.sha256[:12]}..., by --file FILE, for "
            f"instance from version control: {code.file}: {said}"
        )
    return code


def learn(session: Any, env: str) -> None:
    """Have the broker know an environment. Raises EnvError for one that is not built."""
    if not session.ask("learn", backend=env, workers=1, is_built=True)["serves"]:
        raise EnvError(f"run: lz env build {env}\nenvironment {env} is not built here", env=env)


def run(
    session: Any,
    function: FunctionCall,
    code: Code,
    env: str,
    told: Sequence[Memory],
    timeout_s: float | None,
    ordinal: int = CPU,
) -> Any:
    """The result of one run; None for one that cannot be shown here. `ordinal`: of the GPU for arrays that were on one.
    Raises what the call raises."""
    held: list[Reference] = []
    value: Any = None
    has_arrays = any(_nodes_there(trees) for trees, _, _ in told)
    for part, memory in zip(function.parts, told, strict=True):
        exchange = Exchange(session, (env,), function.label, env.rpartition(".")[0], part.stays)
        exchange.library = "numpy"
        trees, there = _on_gpu(memory, ordinal)
        if ordinal != CPU and not has_arrays and part.kind != of_function.LOAD:  # its results were to be there
            there = GpuArguments(describe(GpuArray(ordinal, TensorSpec.contiguous("uint8", (0,))))), len(memory[2])
        loan = None if there is None else lend(session.gpus, there[0], range(there[1], MAX_LENT))
        frame, lent, keep = _frame(part, code, (trees, *memory[1:]), held, loan)
        answer = exchange.run(exchange.request(frame, lent, timeout_s=timeout_s, keep=keep, loan=loan))
        if answer.error is not None and UNREADABLE in answer.error.message:
            return None
        if answer.error is not None:
            raise answer.error
        value = _of_host(answer.value)
        held += [value] if isinstance(value, Reference) else []
    if function.parts[-1].kind == of_function.MANY:
        results, failure = value
        if failure is not None:
            raise failure
        return results
    return None if isinstance(value, Reference) else value


def _on_gpu(memory: Memory, ordinal: int) -> tuple[list[Any], tuple[GpuArguments, int] | None]:
    """The trees for one run, with arrays that were on a GPU there, and how many ranges of shared memory come before
    them; with none they are NumPy's, or torch's, in shared memory."""
    trees = copy.deepcopy(memory[0])
    nodes = _nodes_there(trees)
    if ordinal == CPU or not nodes:
        for node in nodes:
            library = node[1].removeprefix(frames.OF_GPU)
            node[1] = library if library == "torch" else "numpy"
        return trees, None
    first = min((node[5] for node in nodes if node[5] != frames.IN_FRAME), default=len(memory[2]))
    blocks = dict[int, GpuArray]()
    for number, (data, offset) in enumerate(memory[2][first:], first):
        room = GpuArray(ordinal, TensorSpec.contiguous("uint8", (len(data) + ALIGNMENTS,)))
        part = room.part(TensorSpec.contiguous("uint8", (len(data),)), (offset - room.address) % ALIGNMENTS)
        part.store(memoryview(bytearray(data)))
        blocks[number] = part
    given: GpuArguments | None = None
    for node in nodes:
        spec = TensorSpec.from_wire(node[2:5])
        if node[5] != frames.IN_FRAME and node[5] not in blocks:
            raise InvalidArgument("the capsule is damaged: an array on a GPU in shared memory")
        made = GpuArray(ordinal, spec) if node[5] == frames.IN_FRAME else blocks[node[5]].part(spec, node[6])
        given = given or GpuArguments(describe(made))
        given.add(describe(made), node)
    assert given is not None
    return trees, (given, first)


def _nodes_there(trees: list[Any]) -> list[list[Any]]:
    return [node for node in of_function.nodes(trees) if str(node[1]).startswith(frames.OF_GPU)]


def _of_host(value: Any) -> Any:
    """A result with arrays of the host in place of ours on a GPU, as far as they are in lists, tuples and dicts."""
    if isinstance(value, GpuArray):
        return on_host(value)
    if type(value) in (list, tuple):
        return type(value)(map(_of_host, value))
    return {key: _of_host(one) for key, one in value.items()} if type(value) is dict else value


def _frame(
    part: Part, code: Code, memory: Memory, held: Sequence[Reference], loan: GpuLoan | None
) -> tuple[Frame, tuple[Any, ...], Any]:
    """`loan`: what it lends on a GPU, in place of the ranges behind those of shared memory."""
    trees, beside, ranges = memory
    ranges = ranges if loan is None else ranges[: loan.first]
    payload = Payload()
    if beside:
        payload.add(len(beside), lambda target: target.__setitem__(slice(None), beside))
    given = [*trees, logging.WARNING]
    head: list[Any]
    if part.kind == of_function.LOAD:
        return Frame([frames.LOAD, code.to_tree()]), all_lent((), None), None
    if part.kind in _HOW:
        if not held:
            raise InvalidArgument("the capsule is damaged: a method without an object")
        head = [frames.USE, held[-1].place, _HOW[part.kind], part.name, *given]
    else:
        head = [frames.MANY if part.kind == of_function.MANY else frames.CALL, code.to_tree(), *given]
    if part.outs:
        head = [frames.PLACE, head, [list(one) for one in part.outs]]
    elif part.stays != frames.NOTHING:
        head = [frames.HOLD, head, part.stays]
    lent: list[Place | None] = []
    keep: list[Any] = []
    for data, offset in ranges:
        block, arena, start = arenas.pool.allocate(len(data) + ALIGNMENTS)
        start += (offset - arena.address - start) % ALIGNMENTS
        ctypes.memmove(arena.address + start, data, len(data))
        lent.append((arena, start, len(data)))
        keep.append(block)
    head = head if loan is None else [frames.GPU, head, loan.outs, False]
    return Frame(head, payload), all_lent([one for one in lent if one is not None], loan), keep


def why(exc: LayerZeroError) -> tuple[str, str]:
    """In a word, and the detail."""
    if isinstance(exc, RemoteError):
        return f"raised {exc.facts.get('type', '')}", exc.message
    return why_of(exc)
