"""A call that somebody has asked for, and what is known of it; who may ask."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from layerzero.broker.core.model import Client, Route
from layerzero.broker.lifting.store import Entry
from layerzero.broker.selection.signature import CallSpec
from layerzero.broker.storage.perf_rows import Identity
from layerzero.envs.lifted.imports import ImportedCall
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.lifting.form import ALIGNMENTS, Lifted
from layerzero.ipc.lifting.keys import call_key
from layerzero.ipc.lifting.specimen import SEEDS, SEEDS_OF_FUNCTIONS
from layerzero.ipc.vocabulary.ops import FUNCTION_ON_GPU, GPU_ARRAYS

_ALIGNMENTS = {0, *ALIGNMENTS}
COUNT_OF_FUNCTIONS = len(GPU_ARRAYS) + 1


@dataclass(eq=False)
class Known:
    """A call that somebody has asked for, on any GPU of a kind; `spec` is on the first one that it was asked for on.
    `entry` is there once it is known whether it is lifted."""

    number: int
    key: str
    spec: CallSpec
    kernel_id: str
    backend: str
    what: Mapping[str, str]
    alignments: tuple[int, ...]
    generation: int = 0  # of the worker that was asked, or is there
    asked_s: float = 0.0
    begun_s: float = math.inf  # that worker has said that it tries it, of a function
    is_answered: bool = False  # by that worker
    entry: Entry | None = None
    is_compared: bool = False  # its worker was asked for it without a proof: one that was proved may be like it
    tried: Lifted | None = None  # it is being proved, after it was like none
    granted: dict[str, CallSpec] = field(default_factory=dict)  # what clients were given leave for, by GPU
    granted_here: dict[str, CallSpec] = field(default_factory=dict)  # and to run its provider in their own process
    was_here: bool = False  # some client has had that
    codes: tuple[str, ...] = ()  # digests of the machine code that it needs, once it was granted
    retry_at_s: float = math.inf  # when a refusal that a busy machine may be to blame for is forgotten
    retries: int = 0
    imported: ImportedCall | None = None  # what is tried for it, where its backend has no worker

    @property
    def family(self) -> Hashable:
        """Equal for calls of one kernel, in one environment, on memory that is aligned alike."""
        return self.kernel_id, self.alignments, tuple(sorted(self.what.items()))

    @cached_property
    def lasting_key(self) -> str:
        """As `key`, but the same whichever process computes a function."""
        attrs = {name: value for name, value in self.spec.attrs.items() if name != "worker"}
        is_function = self.spec.op == FUNCTION_ON_GPU
        return call_key(replace(self.spec, attrs=attrs), self.alignments, self.what) if is_function else self.key

    @property
    def seeds(self) -> tuple[int, ...]:
        """What its worker is to try it with."""
        its = SEEDS_OF_FUNCTIONS if self.spec.op == FUNCTION_ON_GPU else SEEDS
        return () if self.is_compared else its

    def facts(self, *, is_pending: bool) -> dict[str, Any]:
        """For `lz status`."""
        state = "asked" if self.entry is None else "lifted" if self.entry.form else "refused"
        if self.was_here:
            state = "in process"
        return {
            "kernel_id": self.kernel_id,
            "backend": self.backend,
            "state": "pending" if is_pending else state,
            "reason": self.entry.reason if self.entry is not None else "",
            "detail": self.entry.detail if self.entry is not None else "",
        }


def forget_due(calls: Iterable[Known], now_s: float) -> bool:
    """Whether some that were refused since the machine was busy may be asked for again."""
    due = [known for known in calls if known.retry_at_s <= now_s]
    for known in due:
        known.entry, known.retry_at_s = None, math.inf
    return bool(due)


def what_of(kernel_id: str, backend: str, gpu: str, identity: Identity | None, spec: CallSpec) -> dict[str, str]:
    """All that the machine code depends on besides the call. `gpu`: the name of its kind. All functions of an
    environment are one kernel: there a call of `spec`, too, without its arrays."""
    made_of = {} if identity is None else asdict(identity)
    made_of.pop("device_uuid", None)  # it serves every GPU of this kind
    if spec.op == FUNCTION_ON_GPU:
        made_of["call"] = hashlib.sha256(spec.attrs["call"].encode()).hexdigest()
    return {"kernel": kernel_id, "backend": backend, "gpu": gpu, **made_of}


def asked_of(client: Client | None, params: Mapping[str, Any]) -> tuple[Client, Route, list[int]]:
    """What a client asks of: its route, and alignments. Raises InvalidArgument."""
    number, alignments = params.get("route"), params.get("alignments")
    route = None if client is None or type(number) is not int else client.routes.get(number)
    if client is None or route is None:
        raise InvalidArgument("lift needs `route`, the number of a route of this client")
    spec = route.signature.spec
    count = COUNT_OF_FUNCTIONS if "call" in params else len(spec.inputs) + len(spec.outputs)
    if (
        not isinstance(alignments, list)
        or len(alignments) != count
        or any(type(one) is not int or one not in _ALIGNMENTS for one in alignments)
    ):
        allowed = sorted(_ALIGNMENTS)
        raise InvalidArgument(f"lift needs `alignments`, {count} of {allowed}, got {alignments!r:.80}")
    return client, route, alignments
