"""The CUDA driver's numbers, structures and signatures as data, for ipc/cuda/library.py and ipc/cuda/driver.py.

Source: cuda.h of CUDA 13.0, functions in the versions of their ABI that CUDA 12 has, too.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p

from layerzero.ipc.cuda.handles import IPC_HANDLE_BYTES

# CUresult
INVALID_VALUE, NEWER_DRIVER_NEEDED, INVALID_DEVICE, ALREADY_MAPPED, ILLEGAL_STATE, NOT_READY = 1, 36, 101, 208, 401, 600
# The process must end, says cuda.h; for 710 the context must; after 214 (uncorrectable ECC) no result can be trusted.
STICKY = frozenset({214, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})

# CUdevice_attribute
MULTIPROCESSORS, MAJOR, MINOR, MPS_ENABLED = 16, 75, 76, 133
# CUpointer_attribute
MEMORY_TYPE, BUFFER_ID, IS_MANAGED, ORDINAL, IS_LEGACY_IPC, MEMPOOL = 2, 7, 8, 9, 10, 17
DEVICE_MEMORY = 2  # CUmemorytype
POSIX_FD = 1  # CUmemAllocationHandleType
PORTABLE_AND_MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
LAZY_PEER_ACCESS = 1  # the only flag that cuIpcOpenMemHandle takes
NON_BLOCKING = 1  # CUstream_flags
DISABLE_TIMING = 2  # CUevent_flags
GEQ, EQ = 0, 1  # CUstreamWaitValue_flags
CAPTURE_ACTIVE = 1  # CUstreamCaptureStatus
CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED = 0, 1, 2  # CUstreamCaptureMode
NO_DESTRUCTOR_SYNC, MOVE = 1, 1  # CUuserObject_flags, CUuserObjectRetain_flags
# What client/gpu/_fastpath.c calls, by its own names.
ENTRIES = {
    "get_current": "cuCtxGetCurrent",
    "is_capturing": "cuStreamIsCapturing",
    "get_attribute": "cuPointerGetAttribute",
    "batch": "cuStreamBatchMemOp_v2",
}
# And client/gpu/_lifted.c.
LAUNCH_ENTRIES = {
    "get_current": "cuCtxGetCurrent",
    "is_capturing": "cuStreamIsCapturing",
    "launch": "cuLaunchKernelEx",
    "fill_8": "cuMemsetD8Async",
    "fill_16": "cuMemsetD16Async",
    "fill_32": "cuMemsetD32Async",
    "copy": "cuMemcpyDtoDAsync_v2",
}
WAIT_32, WRITE_32 = 1, 2  # CUstreamBatchMemOpType
# CUstreamBatchMemOpParams, one that waits for or writes a word: operation, address, value, flags, alias (the driver's).
_WORD_OP = "i4xQQI4xQ8x"
WORD_OP = struct.Struct("@" + _WORD_OP)
TWO_WORD_OPS, THREE_WORD_OPS = struct.Struct("@" + 2 * _WORD_OP), struct.Struct("@" + 3 * _WORD_OP)


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("reserved", c_ubyte * IPC_HANDLE_BYTES)]


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_meta_data", c_void_p),
        ("alloc_flags", c_ubyte * 8),
    ]


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


DEVICE_LOCATION, PINNED, READ_WRITE = 1, 1, 3  # CUmemLocationType, CUmemAllocationType, CUmemAccess_flags
out_int, out_u64, out_size, out_handle = POINTER(c_int), POINTER(c_uint64), POINTER(c_size_t), POINTER(c_void_p)

SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDriverGetVersion": (out_int,),
    "cuDeviceGetCount": (out_int,),
    "cuDeviceGet": (out_int, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(c_ubyte * 16), c_int),
    "cuDeviceTotalMem_v2": (out_size, c_int),
    "cuDeviceGetAttribute": (out_int, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (out_handle, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (out_handle,),
    "cuCtxGetCurrent": (out_handle,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (out_u64, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemGetInfo_v2": (out_size, out_size),
    "cuMemGetAddressRange_v2": (out_u64, out_size, c_uint64),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuIpcGetMemHandle": (POINTER(IpcHandle), c_uint64),
    "cuIpcOpenMemHandle_v2": (out_u64, IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemGetAllocationGranularity": (out_size, POINTER(AllocationProp), c_int),
    "cuMemCreate": (out_u64, c_size_t, POINTER(AllocationProp), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (out_int, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (out_u64, c_void_p, c_int),
    "cuMemAddressReserve": (out_u64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(AccessDesc), c_size_t),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (out_u64, c_void_p, c_uint),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuStreamCreate": (out_handle, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamQuery": (c_void_p,),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (out_handle, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuCtxRecordEvent": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint, c_uint),
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint, c_uint),
    "cuStreamBatchMemOp_v2": (c_void_p, c_uint, c_void_p, c_uint),
    "cuStreamIsCapturing": (c_void_p, out_int),
    "cuStreamGetCaptureInfo_v2": (c_void_p, out_int, out_u64, out_handle, out_handle, out_size),
    "cuThreadExchangeStreamCaptureMode": (out_int,),
    "cuUserObjectCreate": (out_handle, c_void_p, c_void_p, c_uint, c_uint),
    "cuUserObjectRelease": (c_void_p, c_uint),
    "cuGraphRetainUserObject": (c_void_p, c_void_p, c_uint, c_uint),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, out_handle),
    "cuGraphGetNodes": (c_void_p, c_void_p, out_size),
    "cuGraphInstantiateWithFlags": (out_handle, c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuModuleLoadData": (out_handle, c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (out_handle, c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuMemsetD16Async": (c_uint64, c_ushort, c_size_t, c_void_p),
    "cuMemsetD32Async": (c_uint64, c_uint, c_size_t, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphGetEdges": (c_void_p, c_void_p, c_void_p, out_size),
    "cuGraphGetEdges_v2": (c_void_p, c_void_p, c_void_p, c_void_p, out_size),
    "cuGraphNodeGetType": (c_void_p, out_int),
    "cuGraphKernelNodeGetParams_v2": (c_void_p, c_void_p),
    "cuGraphKernelNodeGetAttribute": (c_void_p, c_int, c_void_p),
    "cuGraphMemsetNodeGetParams": (c_void_p, c_void_p),
    "cuGraphMemcpyNodeGetParams": (c_void_p, c_void_p),
    "cuGraphChildGraphNodeGetGraph": (c_void_p, out_handle),
    "cuKernelGetFunction": (out_handle, c_void_p),
    "cuFuncGetModule": (out_handle, c_void_p),
    "cuFuncGetName": (POINTER(c_char_p), c_void_p),
    "cuFuncGetParamInfo": (c_void_p, c_size_t, out_size, out_size),
    "cuFuncGetAttribute": (out_int, c_int, c_void_p),
}


def exportable(ordinal: int) -> AllocationProp:
    return AllocationProp(PINNED, POSIX_FD, Location(DEVICE_LOCATION, ordinal))
