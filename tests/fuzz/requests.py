"""What a client may ask the broker besides calls, with any parameters: an answer that can be sent, or a typed error.
In a broker of its own, with its sockets and its database, whose loop does not run."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

from tests.fuzz import scratch, values
from tests.simulation import route_body

from layerzero.broker.configuration.policy_source import PolicySource
from layerzero.broker.configuration.settings import Settings
from layerzero.broker.core.state import BrokerState
from layerzero.broker.io import frame_codec
from layerzero.broker.io.authentication import Authentication
from layerzero.broker.processes.launcher import Launcher
from layerzero.broker.queries import methods
from layerzero.broker.selection.policy_values import Known
from layerzero.broker.selection.ranking import Engine
from layerzero.broker.server import Server
from layerzero.capabilities.device import DeviceSpec
from layerzero.ipc.errors import LayerZeroError
from layerzero.ipc.transport import wire
from layerzero.ipc.transport.endpoints import open_endpoints
from layerzero.ipc.transport.messages import Request, encode
from layerzero.ipc.transport.wire import Kind
from layerzero.ipc.vocabulary.ops import OPS

TYPED = (LayerZeroError,)
_BACKENDS = Path(__file__).parents[1] / "backends"


@cache
def _server() -> Server:
    return make_server(scratch.folder())


def make_server(folder: Path) -> Server:
    """A broker whose loop does not run, with its files in `folder`."""
    settings = Settings(
        runtime_dir=folder, store=folder / "store", manifest_dirs=(_BACKENDS,), perf_db=folder / "perf.db", policy=None
    )
    launcher = Launcher(settings)
    known = Known.of(launcher.capabilities, OPS)
    policy = PolicySource(folder / "policy.yaml", is_optional=True, variables=(), known=known)
    engine = Engine(launcher.capabilities, DeviceSpec(), policy=policy.policy)
    state = BrokerState(engine, launcher.unusable, settings.limits(), random.Random(1))
    return Server(
        settings,
        open_endpoints(folder / "run"),
        state,
        launcher,
        policy,
        Authentication(None, ()),
        stays=True,
        parts_users=False,
    )


def run(data: bytes) -> None:
    server = _server()
    asked = frame_codec.of_client(b"C1", wire.pack(Kind.REQUEST, seq=1, body=data))
    assert isinstance(asked, frame_codec.Asked)
    if asked.request.method in ("shutdown", "readiness"):  # ends it; looks at this machine for a while
        return
    frame_codec.response(1, methods.answer(server, asked.request.method, asked.request.params))


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
        "plan_choice": {"plan": "0" * 64},
        "keep_plan_choice": {"plan": "0" * 64, "policy": "", "chosen": "", "us": {"": 2.0, "alpha": 1.0}, "what": "f"},
        "locks": {"backends": ["alpha"], "kernels": ["alpha.silu"], "text": True},
    }
    return {method: encode(Request(method=method, params=given)) for method, given in params.items()}
