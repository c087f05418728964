"""Whether a lifted call does what its library does, tried by the driver alone before a caller loads any of it.

On other memory than it was captured on, for inputs that the worker has run as well: twice in a row, with scratch and
unwritten parameters filled with one pattern, then another, and on two streams at once. Every byte of its outputs must
be the worker's, or, of an output that the worker did not get twice the same, the numbers of a sample but for rounding
(results.py); what lies around them, and its inputs, must be as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from layerzero.ipc.cuda.driver import Context, Driver, read_back
from layerzero.ipc.errors import CudaError
from layerzero.ipc.lifting.form import ALIGNMENTS, Lifted
from layerzero.ipc.lifting.gpu_digest import GpuDigest
from layerzero.ipc.lifting.launch import LoadedCall
from layerzero.ipc.lifting.reasons import LiftReason
from layerzero.ipc.lifting.results import Result, is_like
from layerzero.ipc.lifting.specimen import Specimen
from layerzero.ipc.lifting.trial import UNWRITTEN, holds, named, pattern, write
from layerzero.ipc.vocabulary.ops import OPS

GUARD_BYTES = 4096  # before and after each piece of memory, which nobody may write to
_GUARD = b"\xee"
PATTERNS = (0x00, 0xA5)  # of scratch and of unwritten parameters
ROUNDS = 4  # launches of each of two streams


@dataclass(frozen=True)
class Verdict:
    """`reason` is None for a call that may be lifted."""

    reason: LiftReason | None = None
    detail: str = ""


class _Piece:
    """Memory between two guards. `address` has the alignment that was asked for, and no better one."""

    def __init__(self, driver: Driver, nbytes: int, alignment: int, stream: int) -> None:
        self._driver, self.nbytes = driver, nbytes
        shift = alignment if 0 < alignment < ALIGNMENTS[-1] else 0
        self._room = 2 * GUARD_BYTES + shift + nbytes
        self._base = driver.allocate(self._room)
        self.address = self._base + GUARD_BYTES + shift
        write(driver, self._base, self._room, _GUARD, stream)

    def is_intact(self, stream: int) -> bool:
        """Whether both guards are as they were made."""
        before, after = self.address - self._base, self._base + self._room - self.address - self.nbytes
        return (
            read_back(self._driver, self._base, before, stream) == _GUARD * before
            and read_back(self._driver, self.address + self.nbytes, after, stream) == _GUARD * after
        )

    def free(self) -> None:
        self._driver.free(self._base)


@dataclass(frozen=True)
class _Set:
    """What launches of one stream work on. `inputs` are shared, but for those that they write to: these are among the
    `outputs`."""

    stream: int
    inputs: Sequence[_Piece | None]
    outputs: Sequence[_Piece]
    scratch: Sequence[_Piece]


def prove(context: Context, specimen: Specimen, digests: GpuDigest | None = None) -> Verdict:
    """Try a lifted call on this GPU. `digests`: of this context, where there was a trial before. Raises CudaError where
    the driver or the GPU stops it."""
    lifted = specimen.lifted
    if not specimen.trials:
        return Verdict(LiftReason.PROOF_IMPOSSIBLE, "the worker has not run it")
    aliases = lifted.aliases()
    written = set(aliases.values())
    sizes = [0 if spec is None else spec.span_bytes for spec in lifted.inputs]
    results = [spec.span_bytes for spec in lifted.outputs]
    with context:
        driver = context.driver
        needed = sum(sizes) + 2 * (sum(results) + sum(lifted.scratch))
        free, _ = driver.memory_info()
        if needed > free // 2:
            text = f"it needs {needed:,} bytes, and {free:,} bytes of this GPU are free"
            return Verdict(LiftReason.PROOF_IMPOSSIBLE, text)
        modules = {name: driver.load_module(code) for name, code in specimen.codes.items()}
        call = LoadedCall(driver, lifted, modules)
        with ExitStack() as stack, _streams(driver) as (one, other):
            for module in modules.values():
                stack.callback(driver.unload_module, module)

            def piece(nbytes: int, alignment: int) -> _Piece:
                made = _Piece(driver, nbytes, alignment, one)
                stack.callback(made.free)
                return made

            def an_input(n: int) -> _Piece | None:
                return None if lifted.inputs[n] is None else piece(sizes[n], lifted.alignments[n])

            shared = [None if n in written else an_input(n) for n in range(len(sizes))]

            def a_set(stream: int) -> _Set:
                inputs = [an_input(n) if n in written else shared[n] for n in range(len(sizes))]

                def output(n: int) -> _Piece:
                    own = inputs[aliases[n]] if n in aliases else None
                    return own or piece(results[n], lifted.alignments[len(inputs) + n])

                outputs = [output(n) for n in range(len(results))]
                return _Set(stream, inputs, outputs, [piece(nbytes, ALIGNMENTS[-1]) for nbytes in lifted.scratch])

            sets = [a_set(one), a_set(other)]
            return _Proof(driver, specimen, call, sets, digests or GpuDigest(driver)).run()


@contextmanager
def _streams(driver: Driver) -> Iterator[tuple[int, int]]:
    streams = driver.create_stream(), driver.create_stream()
    try:
        yield streams
    finally:
        for stream in streams:
            driver.synchronize_stream(stream)
            driver.destroy_stream(stream)


class _Proof:
    """All memory is made; needs the context to be current."""

    def __init__(
        self,
        driver: Driver,
        specimen: Specimen,
        call: LoadedCall,
        sets: Sequence[_Set],
        digests: GpuDigest,
    ) -> None:
        self._driver, self._specimen, self._call, self._sets = driver, specimen, call, sets
        self._digests, self._filled = digests, dict[int, str]()  # by address: of large inputs as they were filled
        self._lifted: Lifted = specimen.lifted
        self._aliased = set(self._lifted.aliases().values())
        self._patterns: list[bytes] = []  # of the inputs, for the present seed

    def run(self) -> Verdict:
        op, specs = self._lifted.op, named(self._lifted.op, self._lifted.inputs)
        for seed, wanted in self._specimen.trials.items():
            self._patterns = [
                b"" if spec is None else pattern(op, name, specs, seed, self._lifted.attrs)
                for name, spec in specs.items()
            ]
            for filling in PATTERNS:
                self._fill_inputs()
                verdict = self._try(self._sets[:1], seed, wanted, filling, rounds=2)
                if verdict.reason is None and filling == PATTERNS[-1]:
                    verdict = self._try(self._sets, seed, wanted, filling, rounds=ROUNDS)
                if verdict.reason is not None:
                    return Verdict(verdict.reason, f"{verdict.detail} (seed {seed}, scratch of {filling:#04x})")
        return Verdict()

    def _fill_inputs(self) -> None:
        for n, piece in self._inputs_of(self._sets):
            if piece.nbytes:
                stream = self._sets[0].stream
                write(self._driver, piece.address, piece.nbytes, self._patterns[n], stream)
                if n not in self._aliased and self._digests.is_for(piece.nbytes):
                    self._filled[piece.address] = self._digests.of(piece.address, piece.nbytes, stream)

    def _inputs_of(self, sets: Sequence[_Set]) -> Iterator[tuple[int, _Piece]]:
        """Each piece once, and which input it is."""
        for one in sets:
            for n, piece in enumerate(one.inputs):
                if piece is not None and (one is sets[0] or n in self._aliased):
                    yield n, piece

    def _try(self, sets: Sequence[_Set], seed: int, wanted: Sequence[Result], filling: int, *, rounds: int) -> Verdict:
        driver, stream = self._driver, sets[0].stream
        for one in sets:
            for piece in one.outputs:
                if piece not in one.inputs:
                    write(driver, piece.address, piece.nbytes, UNWRITTEN, one.stream)
            for piece in one.scratch:
                write(driver, piece.address, piece.nbytes, bytes([filling]), one.stream)
        for _ in range(rounds):
            for one in sets:
                addresses = [0 if piece is None else piece.address for piece in one.inputs]
                outputs, scratch = ([piece.address for piece in pieces] for pieces in (one.outputs, one.scratch))
                self._call.launch(addresses, outputs, scratch, one.stream, padding=filling)
        for one in sets:
            driver.synchronize_stream(one.stream)
        for one in sets:
            for n, piece in enumerate(one.outputs):
                if not is_like(driver, piece.address, self._lifted.outputs[n], seed, wanted[n], stream, self._digests):
                    name = OPS[self._lifted.op].outputs[n]
                    how = "on two streams at once" if len(sets) > 1 else "alone"
                    return Verdict(LiftReason.PROOF_DIFFERS, f"{name} is not what the library gave, {how}")
            for piece in (*one.outputs, *one.scratch):
                if not piece.is_intact(stream):
                    return Verdict(LiftReason.PROOF_STRAYS, "bytes beside an output or scratch were written")
        for n, piece in self._inputs_of(sets):
            if not piece.is_intact(stream) or not (n in self._aliased or self._is_as_filled(piece, self._patterns[n])):
                return Verdict(LiftReason.PROOF_STRAYS, "bytes of an input, or beside one, were written")
        return Verdict()

    def _is_as_filled(self, piece: _Piece, data: bytes) -> bool:
        stream, filled = self._sets[0].stream, self._filled.get(piece.address)
        if filled is not None:
            return self._digests.of(piece.address, piece.nbytes, stream) == filled
        return holds(self._driver, piece.address, piece.nbytes, data, stream)


def prove_bytes(context: Context, data: bytes, digests: GpuDigest | None = None) -> Verdict:
    """As `prove`, of a packed specimen; what the driver refuses is a verdict, too. Raises ProtocolError, and CudaError
    when this process has lost its GPU."""
    specimen = Specimen.unpack(data)
    try:
        return prove(context, specimen, digests)
    except CudaError as exc:
        if exc.is_sticky:
            raise  # this process can try nothing more
        if exc.is_out_of_memory:
            return Verdict(LiftReason.PROOF_IMPOSSIBLE, exc.message)
        return Verdict(LiftReason.PROOF_FAULTED, exc.message)
