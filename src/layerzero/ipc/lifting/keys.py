"""By what lifted calls are known: the call itself, the alignments of its tensors, and all that its machine code depends
on besides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from layerzero.ipc.lifting.form import FORMAT
from layerzero.ipc.vocabulary.signature import CallSignature

# What `what` of a key has: the names of a kernel, its backend and a kind of GPU, versions and hashes.
WHAT = (
    "kernel",
    "backend",
    "gpu",
    "driver_version",
    "cuda_version",
    "backend_version",
    "torch_version",
    "layerzero_version",
    "capabilities_hash",
    "env_hash",
)


def call_digest(call: CallSignature) -> str:
    """Of the call alone, wherever its tensors lie and whoever serves it."""
    return _digest(_parts(call))


def call_key(call: CallSignature, alignments: Sequence[int], what: Mapping[str, str]) -> str:
    """Of the call, and of all that its machine code depends on."""
    return _digest({**_parts(call), "alignments": list(alignments), "what": dict(what)})


def _parts(call: CallSignature) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "op": call.op,
        "inputs": [None if one is None else one.to_wire() for one in call.inputs],
        "outputs": [one.to_wire() for one in call.outputs],
        "attrs": dict(call.attrs),
    }


def _digest(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
