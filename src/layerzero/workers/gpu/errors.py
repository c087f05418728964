"""What errors of foreign libraries say about the GPU."""

from __future__ import annotations

from layerzero.ipc.errors import CudaError


def is_out_of_memory(error: BaseException) -> bool:
    """Of the GPU, by what libraries call it: ours, torch and CuPy by the class, JAX by the text."""
    if isinstance(error, CudaError):
        return error.is_out_of_memory
    return type(error).__name__ == "OutOfMemoryError" or "RESOURCE_EXHAUSTED" in str(error)
