"""What a client may ask the broker besides calls, with any parameters: an answer that can be sent, or a typed error.
In a broker of its own, with its sockets and its database, whose loop does not run."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from tests.fuzz import scratch, values
from tests.simulation import route_body

from layerzero.broker import frames, requests
from layerzero.broker.engine import Engine
from layerzero.broker.gate import Gate
from layerzero.broker.launcher import Launcher
from layerzero.broker.policy_source import PolicySource
from layerzero.broker.policy_values import Known
from layerzero.broker.server import Server
from layerzero.broker.settings import Settings
from layerzero.broker.state import BrokerState
from layerzero.capabilities.device import DeviceSpec
from layerzero.ipc import wire
from layerzero.ipc.endpoints import open_endpoints
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.messages import Request, encode
from layerzero.ipc.ops import OPS
from layerzero.ipc.wire import Kind

TYPED = (LayerZeroError,)
_BACKENDS = Path(__file__).parents[1] / "backends"


@cache
def _server() -> Server:
    folder = scratch.folder()
    settings = Settings(
        runtime_dir=folder, store=folder / "store", manifest_dirs=(_BACKENDS,), perf_db=folder / "perf.db", policy=None
    )
    launcher = Launcher(settings)
    known = Known.of(launcher.capabilities, OPS)
    policy = PolicySource(folder / "policy.yaml", is_optional=True, variables=(), known=known)
    engine = Engine(launcher.capabilities, DeviceSpec(), policy=policy.policy)
    state = BrokerState(engine, launcher.unusable, settings.limits(), random.Random(1))
    return Server(settings, open_endpoints(folder / "run"), state, launcher, policy, Gate(None, ()), stays=True)


def run(data: bytes) -> None:
    server = _server()
    asked = frames.of_client(b"C1", wire.pack(Kind.REQUEST, seq=1, body=data))
    assert isinstance(asked, frames.Asked)
    if asked.request.method in ("shutdown", "readiness"):  # ends it; looks at this machine for a while
        return
    frames.response(1, requests.answer(server, asked.request.method, asked.request.params))


def mutate(data: bytes, rng: random.Random) -> bytes | None:
    return values.mutated(data, rng)


def seeds() -> dict[str, bytes]:
    route, other = route_body(), route_body("gelu", "float64")
    layer = {"origin": "prefer()", "values": {"rules": [{"match": {"op": "silu"}, "prefer": ["alpha"]}]}}
    params = {
        "status": {},
        "explain": {"route": route},
        "compile": {"route": route, "backends": ["alpha"]},
        "plan": {"routes": [route, other], "calls": [0, 1, 0], "links": [[0, 1, 0]], "rewrites": [[[0, 1], 1]]},
        "policy": {"overlay": {"layers": [layer]}},
        "solve": {"measured": [{"route": route, "us": {"alpha.silu": 5.0}}], "command": "lz solve"},
        "reset": {"backend": "alpha"},
        "provider": {"backend": "alpha"},
        "shadow": {"route": route, "kernel_id": "alpha.silu", "reference": "alpha.silu", "error": 0.5},
        "sample": {"route": route},
        "load_table": {},
        "stay": {},
        "health": {"backend": "alpha"},
    }
    return {method: encode(Request(method=method, params=given)) for method, given in params.items()}
