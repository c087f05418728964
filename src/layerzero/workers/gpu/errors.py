"""What errors of foreign libraries say about the GPU."""

from __future__ import annotations

from layerzero.ipc.errors import CudaError, LayerZeroError, NoTransport


def is_out_of_memory(error: BaseException) -> bool:
    """Of the GPU, by what libraries call it: ours, torch and CuPy by the class, JAX by the text."""
    if isinstance(error, CudaError):
        return error.is_out_of_memory
    return type(error).__name__ == "OutOfMemoryError" or "RESOURCE_EXHAUSTED" in str(error)


def no_transport(error: Exception, handle: object) -> NoTransport:
    """Why memory of a client, by the handle that it sent, does not reach this process."""
    if isinstance(error, NoTransport):
        return error
    transport = str(handle.get("transport", ""))[:40] if isinstance(handle, dict) else ""
    reason = (error.message if isinstance(error, LayerZeroError) else str(error))[:1000]
    return NoTransport(
        f"GPU memory does not reach the worker by {transport!r}: {reason}", transport=transport, reason=reason
    )
