"""`python -m layerzero.workers.switching [GPU [BROKER_PID]]`: how long a GPU takes to change to another process.

Two processes run a small kernel in turns, each when the GPU says that the other's is done; no CPU has a part in it. Off
the time of a round is taken what a round takes in which one process runs both kernels, and the other only waits and
answers: the GPU changes for kernels, not for that. Half of what is left is one change.

Prints a line of JSON: {"us": float} or {"error": text}. GPU: a UUID; the first one, where none is given. Takes less
than LIMIT_S from when both processes have their contexts.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from typing import NoReturn

from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.cuda.driver import Context
from layerzero.ipc.cuda.kernels import config_of
from layerzero.ipc.errors import CudaError, LayerZeroError
from layerzero.workers.boot import die_with_parent

ROUNDS, TRIALS = 32, 5  # of a trial; of each kind, and the fastest counts: others use the GPU, too
LIMIT_S = 1.5
OURS, THEIRS = 0, 128  # bytes into the page
_LOOK_S = 0.0002
_SMALL = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry small(.param .u64 at) {
  .reg .u64 %p; .reg .u32 %v;
  ld.param.u64 %p, [at]; ld.global.u32 %v, [%p]; add.u32 %v, %v, 1; st.global.u32 [%p], %v; ret;
}
"""


class _Late(Exception):
    """It takes too long."""


class _End:
    """One of the two processes, on its own stream."""

    def __init__(self, gpu: str, page: mmap.mmap) -> None:
        self.driver = cuda.load()
        gpus = self.driver.gpus()
        if not gpus:
            raise OSError("the driver sees no GPU")
        self._context = Context(self.driver, gpu or gpus[0].uuid)
        self.driver.push_context(self._context.handle)  # for good: this process ends soon
        self.stream = self.driver.create_stream()
        at = ctypes.addressof(ctypes.c_char.from_buffer(page))
        self._words = self.driver.host_register(at, len(page), page)
        self._function = self.driver.function(self.driver.load_module(_SMALL), "small")
        self._memory = ctypes.c_uint64(self.driver.allocate(4))
        self._params = (ctypes.c_void_p * 1)(ctypes.addressof(self._memory))
        self._config = config_of((1, 1, 1), (1, 1, 1), 0, ())
        self._config.stream = self.stream
        self.work()
        self.driver.synchronize_stream(self.stream)

    def work(self) -> None:
        self.driver.launch_kernel(self._config, self._function, self._params)

    def say(self, word: int, value: int) -> None:
        self.driver.write_value(self.stream, self._words + word, value)

    def hear(self, word: int, value: int) -> None:
        self.driver.wait_value(self.stream, self._words + word, value)


def main(argv: list[str]) -> int:
    gpu, parent = (*argv, "", "")[:2]
    if parent:
        die_with_parent(int(parent))
    try:
        said: dict[str, object] = {"us": _measure(gpu)}
    except _Late:
        said = {"error": f"the GPU did not take turns within {LIMIT_S:g} s"}
    except (OSError, LayerZeroError) as exc:
        said = {"error": str(exc)[:500]}
    print(json.dumps(said), flush=True)
    os._exit(0)  # what still waits on the GPU ends with the process


def _measure(gpu: str) -> float:
    page = mmap.mmap(-1, mmap.PAGESIZE)
    asked, answers = os.pipe(), os.pipe()
    me = os.getpid()
    child = os.fork()  # before either has a context
    if not child:
        _answer(gpu, page, asked[0], answers[1], me)
    try:
        mine = _End(gpu, page)
        if os.read(answers[0], 1) != b"+":
            raise CudaError("the other process has no context", call="fork", number=0, name="", sticky=False)
        until_s = time.monotonic() + LIMIT_S
        rounds = 0
        best = {True: float("inf"), False: float("inf")}
        for trial in range(2 * TRIALS):
            takes_turns = bool(trial % 2)
            os.write(asked[1], b"K" if takes_turns else b"-")
            if os.read(answers[0], 1) != b"+":
                raise CudaError("the other process has failed", call="fork", number=0, name="", sticky=False)
            best[takes_turns] = min(best[takes_turns], _trial(mine, rounds, takes_turns=takes_turns, until_s=until_s))
            rounds += ROUNDS
        return round((best[True] - best[False]) / 2, 3)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def _trial(mine: _End, before: int, *, takes_turns: bool, until_s: float) -> float:
    """Microseconds of a round."""
    driver = mine.driver
    start, stop = driver.create_event(is_timed=True), driver.create_event(is_timed=True)
    driver.record_event(start, mine.stream)
    for n in range(before + 1, before + ROUNDS + 1):
        mine.work()
        if not takes_turns:
            mine.work()
        mine.say(OURS, n)
        mine.hear(THEIRS, n)
    driver.record_event(stop, mine.stream)
    while not driver.is_event_done(stop):
        if time.monotonic() > until_s:
            raise _Late
        time.sleep(_LOOK_S)
    elapsed_us = driver.elapsed_ns(start, stop) / 1e3
    driver.destroy_event(start)
    driver.destroy_event(stop)
    return elapsed_us / ROUNDS


def _answer(gpu: str, page: mmap.mmap, asked: int, answers: int, parent: int) -> NoReturn:
    """The other process: it ends with the first."""
    try:
        die_with_parent(parent)
        its, rounds = _End(gpu, page), 0
        os.write(answers, b"+")
        while kind := os.read(asked, 1):
            for n in range(rounds + 1, rounds + ROUNDS + 1):
                its.hear(OURS, n)
                if kind == b"K":
                    its.work()
                its.say(THEIRS, n)
            rounds += ROUNDS
            os.write(answers, b"+")
    except (OSError, LayerZeroError) as exc:
        print(exc, file=sys.stderr, flush=True)
        os.write(answers, b"!")
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
