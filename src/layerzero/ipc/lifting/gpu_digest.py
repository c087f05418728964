"""A digest of device memory that the GPU itself computes: the bytes of large tensors are not read back for a proof.

128 bits, in two sums over all bytes: of (256 i + byte i), mixed by splitmix64's finalizer (Steele, Lea, Flood: Fast
splittable pseudorandom number generators, 2014), and of that, mixed once more. Sums do not depend on the order in which
threads add. What differs by a fault has the same digest once in 2^128; it withstands nobody who looks for such bytes.
"""

from __future__ import annotations

import ctypes

from layerzero.ipc.cuda.driver import Driver, read_back
from layerzero.ipc.cuda.kernels import config_of
from layerzero.ipc.errors import CudaError

PREFIX = "gpu:"
LEAST_BYTES = 1 << 20  # below, reading back takes less than a launch and its wait
DIGEST_BYTES = 16
_BLOCKS, _THREADS = 1056, 256
_ENTRY = "layerzero_digest"
MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)

_PTX = f"""
.version 6.0
.target sm_60
.address_size 64

.visible .entry {_ENTRY}(.param .u64 bytes, .param .u64 count, .param .u64 sums)
{{
    .reg .pred %over;
    .reg .u32 %block, %threads, %thread, %blocks, %value;
    .reg .u64 %at, %end, %to, %place, %i, %step, %one, %two, %x, %y, %t, %golden, %m1, %m2, %m3;

    ld.param.u64 %at, [bytes];
    ld.param.u64 %end, [count];
    ld.param.u64 %to, [sums];
    cvta.to.global.u64 %at, %at;
    cvta.to.global.u64 %to, %to;
    mov.u64 %golden, 0x{MIX[0]:X}U;
    mov.u64 %m1, 0x{MIX[1]:X}U;
    mov.u64 %m2, 0x{MIX[2]:X}U;
    mov.u64 %m3, 0x{MIX[3]:X}U;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    mul.wide.u32 %i, %block, %threads;
    cvt.u64.u32 %t, %thread;
    add.u64 %i, %i, %t;
    mul.wide.u32 %step, %blocks, %threads;
    mov.u64 %one, 0;
    mov.u64 %two, 0;
NEXT:
    setp.ge.u64 %over, %i, %end;
    @%over bra ADD;
    add.u64 %place, %at, %i;
    ld.global.u8 %value, [%place];
    cvt.u64.u32 %t, %value;
    shl.b64 %x, %i, 8;
    or.b64 %x, %x, %t;
    add.u64 %x, %x, %golden;
    shr.u64 %t, %x, 30;
    xor.b64 %x, %x, %t;
    mul.lo.u64 %x, %x, %m1;
    shr.u64 %t, %x, 27;
    xor.b64 %x, %x, %t;
    mul.lo.u64 %x, %x, %m2;
    shr.u64 %t, %x, 31;
    xor.b64 %x, %x, %t;
    add.u64 %one, %one, %x;
    mul.lo.u64 %y, %x, %m3;
    shr.u64 %t, %y, 32;
    xor.b64 %y, %y, %t;
    mul.lo.u64 %y, %y, %m3;
    shr.u64 %t, %y, 29;
    xor.b64 %y, %y, %t;
    add.u64 %two, %two, %y;
    add.u64 %i, %i, %step;
    bra NEXT;
ADD:
    red.global.add.u64 [%to], %one;
    red.global.add.u64 [%to+8], %two;
    ret;
}}
"""


class GpuDigest:
    """Of memory in one context, for one thread. What it holds stays as long as the context."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._function: int | None = None  # 0: this driver does not take it
        self._refusal: CudaError | None = None
        self._sums = 0

    def is_for(self, nbytes: int) -> bool:
        """Whether so many bytes are worth a launch, and this driver takes the kernel. Needs a current context."""
        return nbytes >= LEAST_BYTES and self._loaded() != 0

    def of(self, address: int, nbytes: int, stream: int) -> str:
        """The digest of bytes on the GPU, once the stream has come to them. Raises CudaError, where `is_for` is false,
        too."""
        driver, function = self._driver, self._loaded()
        if self._refusal is not None:
            raise self._refusal
        driver.clear(self._sums, DIGEST_BYTES, stream)
        values = [ctypes.c_uint64(value) for value in (address, nbytes, self._sums)]
        table = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        config = config_of((_BLOCKS, 1, 1), (_THREADS, 1, 1), 0, ())
        config.stream = stream
        driver.launch_kernel(config, function, table)
        return PREFIX + read_back(driver, self._sums, DIGEST_BYTES, stream).hex()

    def _loaded(self) -> int:
        if self._function is None:
            self._function = 0
            try:
                module = self._driver.load_module(_PTX.encode() + b"\0")
                self._sums = self._driver.allocate(DIGEST_BYTES)
                self._function = self._driver.function(module, _ENTRY)
            except CudaError as exc:
                if exc.is_sticky:
                    raise
                self._refusal = exc
        return self._function
