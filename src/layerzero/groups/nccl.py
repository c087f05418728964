"""Calls of all ranks on GPUs, by NCCL: the process's own torch has the tensors, and makes the calls.

A call returns when the GPU has done it: a kernel of NCCL waits for the other ranks, and whoever dies is seen by this
process alone, which aborts it then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from layerzero.client.connection.report import Copy
from layerzero.groups import calls, faults
from layerzero.groups.choices import START_S
from layerzero.groups.peers import Peers


class Nccl:
    """This rank's part of a group's NCCL, on GPU `device` of its torch."""

    def __init__(self, runtime: Path, group: str, generation: int, rank: int, device: int) -> None:
        self._path = runtime / "groups" / f"{group}.{generation}.nccl"
        self._rank, self.device = rank, device
        self._group: Any = None

    def why_not(self) -> str:
        """Why it cannot be started here; empty where it can."""
        torch = sys.modules["torch"]
        if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
            return f"install a torch with NCCL on this rank: torch {torch.__version__} here has none"
        return ""

    def place(self) -> str:
        """The GPU, as all processes of the machine name it."""
        properties = sys.modules["torch"].cuda.get_device_properties(self.device)
        return f"{properties.name} {getattr(properties, 'uuid', self.device)}"

    def start(self, peers: Peers, size: int, until_s: float) -> None:
        """With all other ranks; connections are made with the first call."""
        self._group = self._made(size)

    def started(self) -> None:
        """By all ranks."""

    def run(self, peers: Peers, call: calls.Call) -> tuple[Copy, ...]:
        """Raises GroupBroken."""
        ended: list[BaseException | None] = []
        stream = self._stream()
        reader, writer = os.pipe2(os.O_CLOEXEC)

        def work() -> None:
            try:
                with self._on(stream):
                    self._call(call)
                ended.append(None)
            except BaseException as exc:
                ended.append(exc)
            finally:
                os.close(writer)

        threading.Thread(target=work, name="nccl", daemon=True).start()
        try:
            peers.wait_for([reader], max(call.until_s, time.monotonic()))
        finally:
            os.close(reader)
        if ended[0] is not None:
            what: dict[str, Any] = {"group": peers.name, "generation": peers.generation, "doing": peers.doing}
            told = str(ended[0]).partition("\n")[0]
            raise faults.broken(
                faults.FAILED, f"nccl of rank {self._rank} failed: {told}", ranks=[self._rank], **what
            ) from ended[0]
        return self._copies(call)

    def drop(self) -> None:
        """End it: kernels that wait for other ranks, too."""
        self._path.unlink(missing_ok=True)
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()

    def close(self) -> None:
        self.drop()

    # --- torch's

    def _made(self, size: int) -> Any:
        from torch.distributed import FileStore, ProcessGroupNCCL

        store = FileStore(str(self._path), size)
        store.set_timeout(timedelta(seconds=START_S))
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)  # calls end by this process's deadline
        return ProcessGroupNCCL(store, self._rank, size, options)

    def _stream(self) -> Any:
        return sys.modules["torch"].cuda.current_stream(self.device)

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """What is enqueued within is done afterwards."""
        with sys.modules["torch"].cuda.stream(stream):
            yield
            stream.synchronize()

    def _call(self, call: calls.Call) -> None:
        from torch.distributed import distributed_c10d as kinds

        x, out, torch = call.given.keep.detach(), call.result.value.detach(), sys.modules["torch"]
        if not x.numel():
            return
        if call.op.reduces:
            flat, result = x.reshape(-1), out.view(-1)
        else:  # of any dtype: bytes
            flat, result = x.reshape(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
        if call.op in (calls.ALL_REDUCE, calls.BROADCAST) and flat.data_ptr() != result.data_ptr():
            result.copy_(flat)
        match call.op.name:
            case "all_reduce":
                options = kinds.AllreduceOptions()
                options.reduceOp = _op(kinds, call.detail)
                self._group.allreduce([result], options).wait()
            case "reduce_scatter":
                options = kinds.ReduceScatterOptions()
                options.reduceOp = _op(kinds, call.detail)
                self._group._reduce_scatter_base(result, flat, options).wait()
            case "all_gather":
                self._group._allgather_base(result, flat, kinds.AllgatherOptions()).wait()
            case "all_to_all":
                self._group.alltoall_base(result, flat, [], [], kinds.AllToAllOptions()).wait()
            case "broadcast":
                options = kinds.BroadcastOptions()
                options.rootRank, options.rootTensor = call.detail, 0
                self._group.broadcast([result], options).wait()
        if call.op.reduces and call.detail == "mean":
            result /= call.size

    @staticmethod
    def _copies(call: calls.Call) -> tuple[Copy, ...]:
        is_copied = call.op in (calls.ALL_REDUCE, calls.BROADCAST) and call.result.value is not call.given.keep
        return (Copy("x", call.given.nbytes, "client", "nccl works in place"),) if is_copied else ()


def _op(kinds: Any, name: str) -> Any:
    ops = kinds.ReduceOp
    return {"sum": ops.SUM, "mean": ops.SUM, "prod": ops.PRODUCT, "min": ops.MIN, "max": ops.MAX}[name]
