"""What is locked for backends, asked for by who writes bundles (docs/bundles.md), and by who opens them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerzero.broker.queries.broker_view import BrokerView
from layerzero.envs.build.lock import find_lock
from layerzero.ipc.errors import InvalidArgument

MAX_NAMES = 1024
MAX_TEXT_BYTES = 1 << 19  # of all locks in an answer, which is one frame


def locks(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Of backends, the id of their environment as `env`, "" where this broker knows none, and its `lock`, "" where it
    has none. `backends`: of each kernel that was asked for its backend, "" where no such kernel is known.

    backends: list of names; kernels: list of kernel ids; text: whether the locks' texts are wanted.
    """
    names, kernels = params.get("backends", []), params.get("kernels", [])
    for given in (names, kernels):
        if not isinstance(given, list) or len(given) > MAX_NAMES or any(type(one) is not str for one in given):
            raise InvalidArgument(f"locks takes lists of at most {MAX_NAMES} texts, got {given!r:.200}")
    known, told, room = server.launcher.env_ids(), dict[str, Any](), MAX_TEXT_BYTES
    for name in names:
        manifest, text = server.launcher.manifests.get(name), ""
        if params.get("text") is True and manifest is not None:
            found = find_lock(manifest, manifest.variant_for(server.settings.variant))
            text = "" if found is None else found.text
            room -= len(text.encode())
            if room < 0:
                raise InvalidArgument(f"ask for fewer locks at a time: their texts pass {MAX_TEXT_BYTES} bytes")
        told[name] = {"env": known.get(name, ""), "lock": text}
    return {"locks": told, "backends": {kernel: server.state.engine.owner(kernel) for kernel in kernels}}
