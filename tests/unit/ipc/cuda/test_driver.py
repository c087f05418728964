"""What ipc/cuda/driver.py makes of a driver's answers and hands over to it. How a real one behaves is in tests/gpu."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from layerzero.ipc.cuda import abi
from layerzero.ipc.cuda import driver as cuda
from layerzero.ipc.errors import CudaError, from_wire

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# Allocating n bytes fails with error n; there are two GPUs.
DRIVER = r"""
#include <stddef.h>
#include <stdio.h>
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuGetErrorName(int n, const char **s) { if (n > 999) return 1; *s = "CUDA_ERROR_OF_A_TEST"; return 0; }
int cuMemAlloc_v2(unsigned long long *p, size_t n) { *p = 42; return n; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetUuid_v2(unsigned char *u, int d) { memset(u, 16 + d, 16); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)(size_t)(1000 + d); return 0; }
static void *stack[9]; static int depth;
int cuCtxPushCurrent_v2(void *c) { stack[++depth] = c; return 0; }
int cuCtxPopCurrent_v2(void **c) { *c = stack[depth--]; return 0; }
int cuCtxGetCurrent(void **c) { *c = stack[depth]; return 0; }
char words[4096];  /* what streams are told about words, as text */
int cuStreamWriteValue32_v2(void *s, unsigned long long a, unsigned v, unsigned f) {
  sprintf(words + strlen(words), "%zu: %llu = %u; ", (size_t)s, a, v); return 0; }
int cuStreamWaitValue32_v2(void *s, unsigned long long a, unsigned v, unsigned f) {
  sprintf(words + strlen(words), "%zu: %llu %s %u; ", (size_t)s, a, f ? "==" : ">=", v); return 0; }
static int mode;
int cuThreadExchangeStreamCaptureMode(int *m) { int old = mode; mode = *m; *m = old; return 0; }
int cuStreamGetCaptureInfo_v2(void *s, int *status, void *id, void **graph, void *d, void *n) {
  *status = s != 0; *graph = (void *)5; return 0; }
static void (*destroy)(void *); static void *kept; static int refused;
int cuUserObjectCreate(void **o, void *p, void (*d)(void *), unsigned count, unsigned flags) {
  if (count != 1 || flags != 1) return 1;
  destroy = d; kept = p; *o = (void *)9; return 0; }
int cuUserObjectRelease(void *o, unsigned count) { destroy(kept); return o == (void *)9 && count == 1 ? 0 : 1; }
int cuGraphRetainUserObject(void *g, void *o, unsigned count, unsigned flags) {
  return refused ? 801 : g == (void *)5 && o == (void *)9 && count == 1 && flags == 1 ? 0 : 1; }
void refuse(int whether) { refused = whether; }
void drop_graph(void) { destroy(kept); }
"""
# As in cuda.h. The driver writes to `alias`.
BATCHES = r"""
typedef unsigned long long u64;
typedef union { int operation; struct { int operation; u64 address; union { unsigned value; u64 value64; };
  unsigned flags; u64 alias; } word; u64 pad[6]; } Op;
extern char words[];
int cuStreamBatchMemOp_v2(void *s, unsigned count, Op *ops, unsigned flags) {
  if (flags) return 1;
  strcat(words, "[");
  for (unsigned i = 0; i < count; i++) {
    const char *how = ops[i].operation == 2 ? "=" : ops[i].operation != 1 ? "?" : ops[i].word.flags ? "==" : ">=";
    sprintf(words + strlen(words), "%zu: %llu %s %llu; ", (size_t)s, ops[i].word.address, how, ops[i].word.value64);
    ops[i].word.alias = 77;
  }
  strcat(words, "]");
  return 0;
}
"""


def build(folder: Path, source: str) -> ctypes.CDLL:
    (folder / "driver.c").write_text(source)
    library = folder / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "driver.c")], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("driver"), DRIVER)


@pytest.fixture(scope="module")
def driver(library: ctypes.CDLL) -> cuda.Driver:
    return cuda.Driver(library._name)


def failure(driver: cuda.Driver, number: int) -> CudaError:
    with pytest.raises(CudaError) as caught:
        driver.allocate(number)
    return caught.value


@pytest.mark.parametrize("number", [214, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911])
def test_error_after_which_the_process_is_lost_is_sticky(driver: cuda.Driver, number: int) -> None:
    """A worker that served on would answer every call with the same error, or with nonsense."""
    assert failure(driver, number).is_sticky


@pytest.mark.parametrize("number", [1, 2, 101, 201, 208, 304, 400, 600, 701, 704, 801, 901, 999])
def test_other_errors_leave_the_process_usable(driver: cuda.Driver, number: int) -> None:
    """Ending the worker would cost its environment's start for nothing."""
    assert not failure(driver, number).is_sticky


def test_out_of_memory_is_told_apart(driver: cuda.Driver) -> None:
    """It alone is worth a second try after trimming."""
    assert failure(driver, 2).is_out_of_memory
    assert not failure(driver, 1).is_out_of_memory


def test_error_names_the_call_the_number_and_the_name(driver: cuda.Driver) -> None:
    """These three are what people search for."""
    error = failure(driver, 700)
    assert error.message == "cuMemAlloc_v2 returned 700 (CUDA_ERROR_OF_A_TEST)"
    assert error.facts == {"call": "cuMemAlloc_v2", "number": 700, "name": "CUDA_ERROR_OF_A_TEST", "sticky": True}
    assert failure(driver, 1000).message == "cuMemAlloc_v2 returned 1000"


def test_error_means_the_same_in_another_process(driver: cuda.Driver) -> None:
    """The broker ends a worker for what the worker's driver said."""
    error = failure(driver, 719)
    copy = from_wire(error.to_wire())
    assert isinstance(copy, CudaError)
    assert (copy.number, copy.is_sticky, copy.is_out_of_memory) == (719, True, False)


@pytest.mark.parametrize("facts", [{}, {"number": "700", "sticky": "yes"}])
def test_error_whose_facts_make_no_sense_is_an_ordinary_one(facts: dict[str, object]) -> None:
    """A peer's facts must not raise where they are read."""
    error = CudaError("made up", **facts)
    assert (error.number, error.is_sticky, error.is_out_of_memory) == (0, False, False)


def test_driver_that_lacks_a_function_is_called_too_old(driver: cuda.Driver) -> None:
    """An AttributeError of ctypes would not say what to do."""
    with pytest.raises(CudaError, match="it lacks cuMemFree_v2; it is too old") as caught:
        driver.free(42)
    assert not caught.value.is_sticky


def test_gpu_is_found_by_its_uuid(driver: cuda.Driver) -> None:
    """Ordinals mean another GPU in the next process."""
    context = cuda.Context(driver, "GPU-11111111-1111-1111-1111-111111111111")
    assert (context.ordinal, context.handle) == (1, 1001)


def test_gpu_that_is_not_visible_is_named_with_those_that_are(driver: cuda.Driver) -> None:
    """The repair is CUDA_VISIBLE_DEVICES, and one must know what it says now."""
    with pytest.raises(CudaError, match=r"GPU-0 is not visible .* sees GPU-10101010-.*, GPU-11111111-.*VISIBLE"):
        cuda.Context(driver, "GPU-0")


def test_context_is_current_within_and_the_former_one_after(driver: cuda.Driver) -> None:
    """The application's own current GPU must be as it was after each call of ours."""
    outer = cuda.Context(driver, "GPU-10101010-1010-1010-1010-101010101010")
    inner = cuda.Context(driver, "GPU-11111111-1111-1111-1111-111111111111")
    seen = [driver.current_context()]
    with outer:
        with inner, inner:
            seen.append(driver.current_context())
        seen.append(driver.current_context())
    assert [*seen, driver.current_context()] == [0, 1001, 1000, 0]


def test_words_are_written_and_waited_for_in_one_call(tmp_path: Path) -> None:
    """Each call of the driver costs a client about a microsecond, and a graph should get one node."""
    library = build(tmp_path, DRIVER + BATCHES)
    driver = cuda.Driver(library._name)
    driver.write_and_wait(7, 1 << 40, 0xFFFFFFFF, (1 << 40) + 128, 5)
    driver.ring_and_wait(8, 4096, 8192)
    driver.tell_and_take(8, 128, 256)
    driver.write_and_wait(9, 16, 1, 32, 2)
    told = ctypes.c_char.in_dll(library, "words")
    assert ctypes.string_at(ctypes.addressof(told)).decode() == (
        "[7: 1099511627776 = 4294967295; 7: 1099511627904 >= 5; ]"
        "[8: 8192 = 0; 8: 4096 = 1; 8: 8192 == 1; ][8: 128 = 1; 8: 256 == 1; 8: 256 = 0; ][9: 16 = 1; 9: 32 >= 2; ]"
    )


def test_driver_without_that_call_is_told_one_by_one(library: ctypes.CDLL, driver: cuda.Driver) -> None:
    """In the same order."""
    driver.write_and_wait(7, 16, 5, 32, 5)
    driver.ring_and_wait(8, 4096, 8192)
    driver.tell_and_take(8, 128, 256)
    told = ctypes.c_char.in_dll(library, "words")
    assert ctypes.string_at(ctypes.addressof(told)).decode() == (
        "7: 16 = 5; 7: 32 >= 5; 8: 8192 = 0; 8: 4096 = 1; 8: 8192 == 1; 8: 128 = 1; 8: 256 == 1; 8: 256 = 0; "
    )


def test_capture_mode_is_exchanged_for_the_former_one(driver: cuda.Driver) -> None:
    """It belongs to the application's thread and must be as it was."""
    before = driver.exchange_capture_mode(abi.CAPTURE_RELAXED)
    assert driver.exchange_capture_mode(before) == abi.CAPTURE_RELAXED


def test_graph_that_is_gone_is_counted_without_python(library: ctypes.CDLL, driver: cuda.Driver) -> None:
    """It happens in a thread of the driver, which may hold locks that the interpreter's lock waits for."""
    counter = (ctypes.c_uint32 * 8)()
    driver.retain_in_graph(7, ctypes.addressof(counter))
    assert counter[0] == 0
    library.drop_graph()
    assert counter[0] == 1


def test_nothing_waits_for_a_graph_that_could_not_keep_it(library: ctypes.CDLL, driver: cuda.Driver) -> None:
    """The caller learns of it by the error, and has nothing to release."""
    counter = (ctypes.c_uint32 * 8)()
    with pytest.raises(CudaError, match="cuStreamGetCaptureInfo_v2 returned 401"):
        driver.retain_in_graph(0, ctypes.addressof(counter))
    library.refuse(1)
    with pytest.raises(CudaError, match="cuGraphRetainUserObject returned 801"):
        driver.retain_in_graph(7, ctypes.addressof(counter))
    library.refuse(0)
