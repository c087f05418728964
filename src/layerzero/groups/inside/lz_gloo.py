"""A rank of torch's gloo, as an object in a process of torch's environment. It is imported there, from this file, and
nowhere else; layerzero.groups.gloo calls it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import warnings
from datetime import timedelta
from typing import Any


class Rank:
    """`path`: the file by which ranks find each other. `pids`: of the processes that have the ranks: when one of them
    ends, so does a call that waits for it."""

    def __init__(self, path: str, rank: int, size: int, pids: list[int], timeout_s: float) -> None:
        import torch
        from torch import distributed
        from torch.distributed import distributed_c10d

        torch.set_num_threads(1)
        self._torch, self._ops, self._kinds, self._size = torch, distributed.ReduceOp, distributed_c10d, size
        before = _connections()
        store = distributed.FileStore(path, size)
        store.set_timeout(timedelta(seconds=timeout_s))
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = distributed.ProcessGroupGloo(store, rank, size, options)
        self._sockets = _connections() - before
        options._timeout = timedelta(days=1)  # calls end by the broker's deadline
        self._group._set_default_timeout(timedelta(days=1))
        threading.Thread(target=self._watch, args=(pids,), daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def all_reduce(self, data: Any, op: str, dtype: str) -> Any:
        values = self._torch.from_numpy(data.copy()).view(getattr(self._torch, dtype))
        options = self._kinds.AllreduceOptions()
        options.reduceOp = self._op(op)
        self._group.allreduce([values], options).wait()
        return self._bytes(values, op)

    def reduce_scatter(self, data: Any, op: str, dtype: str) -> Any:
        values = self._torch.from_numpy(data.copy()).view(getattr(self._torch, dtype))
        mine = values.new_empty(len(values) // self._size)
        options = self._kinds.ReduceScatterOptions()
        options.reduceOp = self._op(op)
        self._group._reduce_scatter_base(mine, values, options).wait()
        return self._bytes(mine, op)

    def all_gather(self, data: Any) -> Any:
        found = self._torch.empty(self._size * len(data), dtype=self._torch.uint8)
        self._group._allgather_base(found, self._read(data), self._kinds.AllgatherOptions()).wait()
        return found.numpy()

    def all_to_all(self, data: Any) -> Any:
        found = self._torch.empty(len(data), dtype=self._torch.uint8)
        self._group.alltoall_base(found, self._read(data), [], [], self._kinds.AllToAllOptions()).wait()
        return found.numpy()

    def broadcast(self, data: Any, root: int) -> Any:
        values = self._torch.from_numpy(data.copy())
        options = self._kinds.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._group.broadcast([values], options).wait()
        return values.numpy()

    def barrier(self) -> None:
        self._group.barrier(self._kinds.BarrierOptions()).wait()

    def _op(self, op: str) -> Any:
        ops = self._ops
        return {"sum": ops.SUM, "mean": ops.SUM, "prod": ops.PRODUCT, "min": ops.MIN, "max": ops.MAX}[op]

    def _bytes(self, values: Any, op: str) -> Any:
        if op == "mean":
            values /= self._size
        return values.view(self._torch.uint8).numpy()

    def _read(self, data: Any) -> Any:
        """Lent memory, which torch only reads."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return self._torch.from_numpy(data)

    def _watch(self, pids: list[int]) -> None:
        """gloo has no way to give a call up; that its connections end is one."""
        poll = select.poll()
        for pid in pids:
            try:
                poll.register(os.pidfd_open(pid), select.POLLIN)
            except ProcessLookupError:
                self._hang_up()
                return
            except OSError:  # a kernel that has none, or a process that cannot be seen from here
                return
        poll.poll()
        self._hang_up()

    def _hang_up(self) -> None:
        for fd in self._sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)


def _connections() -> set[int]:
    """Descriptors of this process that are connections by TCP."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as sock:
            if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM and sock.getpeername():
                found.add(int(name))
    return found
