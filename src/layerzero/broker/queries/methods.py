"""What clients can ask the broker besides calls: one function per method, plain values in and out. One that takes as
long as a call is a generator: its answer is made in steps (questions.py)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from layerzero.broker.core import events as ev
from layerzero.broker.queries.broker_view import BrokerView
from layerzero.broker.queries.decisions import decisions
from layerzero.broker.queries.function_workers import free, learn, renew, reserve
from layerzero.broker.queries.joint_plans import plan
from layerzero.broker.queries.last_calls import last_calls
from layerzero.broker.queries.locks import locks
from layerzero.broker.queries.metrics import LIVING, metrics, serving
from layerzero.broker.queries.plan_choices import keep_plan_choice, plan_choice
from layerzero.broker.queries.readiness import examine, wanted_backends
from layerzero.broker.queries.restarts import METHODS as RESTARTS
from layerzero.broker.queries.rollouts import METHODS as ROLLOUTS
from layerzero.broker.queries.rollouts import problems as rollout_problems
from layerzero.broker.queries.steering import METHODS as STEERING
from layerzero.broker.selection import dispatch_table
from layerzero.broker.selection.certification import Subject
from layerzero.broker.selection.shadow import Comparison
from layerzero.broker.selection.signature import CallSpec, unknown_backend
from layerzero.broker.selection.tuning import Usage, next_sample
from layerzero.capabilities.reasons import Reason
from layerzero.ipc.errors import InvalidArgument, LayerZeroError
from layerzero.ipc.names import unknown_name
from layerzero.ipc.transport import wire
from layerzero.ipc.version import __version__
from layerzero.ipc.vocabulary import pools
from layerzero.ipc.vocabulary.worker_codes import lane_of

BACKENDS_A_STEP = 4
MAX_SAMPLE_RUNS = 64
MAX_CLIENTS_SHOWN = 100  # of the oldest; thousands would fill the answer
Steps = Generator[None, None, dict[str, Any]]


def answer(server: BrokerView, method: str, params: Mapping[str, Any]) -> Any:
    """Run one method. Raises LayerZeroError."""
    begun = begin(server, method, params)
    if isinstance(begun, Generator):
        while True:
            try:
                next(begun)
            except StopIteration as end:
                return end.value
    return begun


def begin(server: BrokerView, method: str, params: Mapping[str, Any], client: bytes = b"") -> Any:
    """As `answer`, or the Steps to it. `client`: who asks, by its identity."""
    function = METHODS.get(method)
    if function is None:
        raise InvalidArgument(unknown_name("method", method, METHODS))
    if method in OF_CLIENTS:
        return OF_CLIENTS[method](server, params, client)
    return function(server, params)


def ping(server: BrokerView, _: Mapping[str, Any]) -> dict[str, Any]:
    """A sign of life."""
    return {"pid": os.getpid()}


def status(server: BrokerView, _: Mapping[str, Any]) -> Steps:
    """The broker, its clients and every backend with its state, cause and repair."""
    state = server.state
    server.poll_lanes()
    yield
    server.poll_timelines()
    yield
    yield from server.counters.poll()
    tally = state.effects.tally
    backends = []
    for name in list(state.workers):
        backends.append(_backend(server, name, time.monotonic()))
        if not len(backends) % BACKENDS_A_STEP:
            yield
    yield
    facts = {
        "broker": {
            "pid": os.getpid(),
            "package": __version__,
            "protocol": wire.PROTOCOL,
            "incarnation": server.incarnation,
            "up_s": round(time.monotonic() - server.started_s, 1),
            "stays": server.stays,
            "runtime_dir": str(server.endpoints.folder),
            "store": str(server.settings.store),
            "stale_answers": state.lifecycle.stale,
        },
        "clients": [
            {
                "number": c.number,
                "open_calls": c.open_calls,
                "arenas": len(c.arenas),
                "bytes": sum(arena.nbytes for arena in c.arenas.values()),
                "gpus": sorted(c.gpus),
            }
            for c in islice(state.clients.values(), MAX_CLIENTS_SHOWN)
        ],
        "users": [] if server.users is None else server.users.facts(),
        "more_clients": max(len(state.clients) - MAX_CLIENTS_SHOWN, 0),
        "devices": [
            {
                "type": spec.device_type,
                "name": spec.device_name,
                "uuid": spec.device_uuid,
                **(server.lifts.switches.facts(key) if key else {}),
            }
            for key, spec in state.engine.devices.items()
        ]
        + [
            {"type": spec.device_type, "name": spec.device_name, "uuid": spec.device_uuid}
            for spec in server.launcher.accelerators
        ],
        "backends": backends,
        **tally.facts(),
        "selection": server.state.engine.facts(),
        "times": server.perfdb.facts(),
        "lifted": server.lifts.facts(),
        "problems": [
            *server.launcher.problems,
            *server.perfdb.problems,
            *rollout_problems(server),
            *filter(None, (server.policy.problem, server.table_problem, server.plan_choices.problem)),
        ],
    }
    yield
    return facts


def _backend(server: BrokerView, name: str, now_s: float) -> dict[str, Any]:
    worker, reason = server.state.workers[name], server.state.unavailable_at(now_s).get(name)
    retry_in_s = server.state.lifecycle.retry_in_s(worker, now_s)
    process = server.processes.get((name, worker.generation))
    running = len(worker.running) + bool(process is not None and lane_of(process.page.read()[0]))
    return {
        "name": name,
        "state": "busy" if running and worker.state.value == "ready" else worker.state.value,
        "pid": worker.pid if worker.state.value in LIVING else None,
        "beside": [
            {"state": one.state.value, "pid": one.pid or None, "running": len(one.running)}
            for one in server.state.lifecycle.succession.of(name)[1:]
        ],
        "ops": sorted(server.launcher.capabilities[name].ops),
        "platform": str(server.launcher.capabilities[name].platform),
        "versions": worker.versions,
        "answered": worker.answered,
        "failed": worker.failed,
        "restarts": worker.restarts,
        "retry_in_s": None if retry_in_s is None else round(retry_in_s, 1),
        "running": running,
        "waiting": len(worker.waiting),
        "enqueued": len(worker.enqueued),
        "unavailable": (
            {"code": reason.code.value, "detail": reason.detail, "repair": reason.repair} if reason else None
        ),
        "cause": worker.cause.message if worker.cause else None,
        **server.launcher.facts(name),
        **server.joined.facts(name),
    }


def _unknown_backend(server: BrokerView, name: object) -> InvalidArgument:
    engine = server.state.engine
    return InvalidArgument(unknown_backend(name, engine.capabilities, engine.refused.get(str(name), "")))


def health(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Can this very backend serve? `ok`: it does, or starts when it is needed; `state`; `detail`: why not; `joins`: by
    a worker that the broker does not start."""
    name = params.get("backend")
    worker = server.state.workers.get(name) if isinstance(name, str) else None
    if worker is None:
        raise _unknown_backend(server, name)
    reason = server.state.unavailable_at(time.monotonic()).get(worker.backend)
    detail = str(reason) if reason else worker.state.value
    is_ok = reason is None or reason.code is Reason.LIFTED_ONLY  # it serves what was imported
    return {"ok": is_ok, "state": worker.state.value, "detail": detail, "joins": worker.is_joined}


def explain(server: BrokerView, params: Mapping[str, Any], client: bytes = b"") -> dict[str, Any]:
    """Who would serve a call signature (an encoded Route message) of the asking client now."""
    body = params.get("route")
    if not isinstance(body, bytes):
        raise InvalidArgument("explain needs `route`: an encoded route message")
    server.poll_lanes()  # for times that workers have told by now
    spec, _, candidates = server.state.explain(body, time.monotonic(), with_lifted_only=True, client=client)
    for pinned in spec.candidates:
        if pinned not in server.state.capabilities:
            raise _unknown_backend(server, pinned)
    return {"candidates": candidates}


def compile_ahead(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Have all kernels of `backends` compiled that would serve a call signature (an encoded Route message) then.

    `pending`: those that are not compiled yet; ask again until there are none.
    """
    body, backends = params.get("route"), params.get("backends")
    if not isinstance(body, bytes) or not isinstance(backends, list):
        raise InvalidArgument("compile needs `route`, an encoded route message, and `backends`, a list of names")
    spec = CallSpec.parse(body)
    server.handle(ev.CompileAsked(spec, backends))
    left = server.state.compiling.missing(spec, time.monotonic())
    return {"pending": [verdict.kernel_id for verdict in left if verdict.backend in backends]}


def policy(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """The policy in force, with a caller's `overlay` on top, which is checked: every value and its origin."""
    overlay = params.get("overlay", {})
    if not isinstance(overlay, dict):
        raise InvalidArgument(f"policy takes `overlay`: a map, not a {type(overlay).__name__}")
    return server.policy.describe(overlay)


def readiness(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Is everything that `backends` (default: all that the policy allows) need in order? `gpus`: which one each
    computes on, by UUID; "" for the CPU. broker/queries/readiness.py."""
    names = params.get("backends")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise InvalidArgument(f"readiness takes `backends`: names, or nothing for all; got {names!r:.80}")
    wanted = wanted_backends(server, names)
    isolation = {name: server.policy.policy.isolation(name) for name in wanted}
    devices = {name: server.state.engine.device_for(name) for name in wanted}
    gpus = {name: "" if device.device_type == "cpu" else device.device_uuid for name, device in devices.items()}
    checks = [check.to_wire() for check in examine(server, names)]
    return {"checks": checks, "backends": wanted, "isolation": isolation, "gpus": gpus}


def solve(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """A dispatch table from measurements, as the `text` of a file. Nothing is kept.

    measured: list of {"route": encoded Route message, "us": map of kernel id to microseconds}; command: what makes the
    table anew.
    """
    engine, measured, backends = server.state.engine, [], set()
    devices = []
    try:
        for one in params["measured"]:
            spec = CallSpec.parse(one["route"])
            context, times = engine.context(spec), dict(one["us"])
            if not all(type(us) in (int, float) and 0 <= us < math.inf for us in times.values()):
                raise InvalidArgument(f"solve takes times as numbers of microseconds, got {times!r:.200}")
            backend_of = dict(engine.kernels(spec.op))
            backends |= {backend_of[kernel_id] for kernel_id in times}
            group, features = dispatch_table.group_of(context), dispatch_table.features_of(context)
            place = dispatch_table.place_of(context.device)
            measured.append(dispatch_table.Measurement(group, features, times, place))
            devices.append(context.device)
        command = str(params["command"])
    except (KeyError, TypeError, ValueError) as exc:
        if isinstance(exc, LayerZeroError):
            raise
        raise InvalidArgument(f"solve takes measured and command: {type(exc).__name__}: {exc}") from exc
    env_ids = server.launcher.env_ids()
    header = dispatch_table.Header(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        layerzero_version=__version__,
        hardware=dispatch_table.hardware_of(devices),
        capability_hashes={name: engine.capabilities[name].hash for name in sorted(backends)},
        env_ids={name: env_ids[name] for name in sorted(backends) if name in env_ids},
        command=command,
    )
    table = dispatch_table.build(measured, header)
    return {"text": table.save(), "kinds": len(table.trees), "buckets": table.buckets}


def load_table(server: BrokerView, _: Mapping[str, Any]) -> dict[str, Any]:
    """Read the dispatch table that the policy names again: `path`, None where it names none, and its `problem`."""
    server.load_table()
    path = server.policy.policy.dispatch_table
    return {"path": None if path is None else str(path), "problem": server.table_problem}


def reset(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Forget a backend's failures, or those of all, after a repair."""
    name = params.get("backend")
    if name is not None and (not isinstance(name, str) or name not in server.state.workers):
        raise _unknown_backend(server, name)
    workers = server.state.workers
    names = [one for one in workers if name is None or pools.environment_of(one) == name] or [str(name)]
    for backend in names:
        if backend in server.joined.names:
            server.handle(ev.BackendReset(backend, None))
            server.joined.offer(backend)
        else:
            renew(server, backend)
            server.handle(ev.BackendReset(backend, server.launcher.missing(backend)))
    return {"reset": names}


def settings(server: BrokerView, _: Mapping[str, Any]) -> dict[str, Any]:
    """What this broker reads, for clients whose environment may name something else."""
    folders = [str(path.absolute()) for path in server.settings.manifest_dirs]
    return {
        "pid": os.getpid(),
        "policy": str(server.policy.file.absolute()),
        "manifest_dirs": folders,
        "profile": server.settings.profile,
        "metrics": server.settings.metrics,
        "history": server.settings.history,
        "record": "" if server.settings.record is None else str(server.settings.record.absolute()),
        "store": str(server.settings.store.absolute()),
    }


def waits(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Which calls of the client with this `identity` wait for a worker that does not run yet, what it does meanwhile
    (`state`) and for how long they have waited."""
    identity, now_s, found = params.get("identity"), time.monotonic(), []
    for worker in server.state.workers.values():
        for call in worker.waiting:
            if call.client.identity == identity and call.waits_since_s <= now_s:
                spec, waited_s = call.route.signature.spec, now_s - call.waits_since_s + call.start_wait_s
                row = {"op": spec.op, "backend": worker.backend, "state": worker.state.value, "waited_s": waited_s}
                found.append(row)
    return {"calls": found}


def stay(server: BrokerView, _: Mapping[str, Any]) -> dict[str, Any]:
    """Do not end with the last client: `lz up` finds a broker that a client has started."""
    server.stays = True
    return {"pid": os.getpid()}


def shutdown(server: BrokerView, _: Mapping[str, Any]) -> dict[str, Any]:
    """Finish what runs, refuse the rest, end."""
    server.post(ev.ShutdownAsked())
    return {"pid": os.getpid()}


def provider(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """What a client needs to run a backend in its own process. `versions`: of its environment, once that was probed."""
    name = params.get("backend")
    manifest = server.launcher.manifests.get(name) if isinstance(name, str) else None
    if manifest is None:
        raise _unknown_backend(server, name)
    record = server.launcher.record(str(name))
    versions = {} if record is None else dict(record.versions)
    return {
        "provider": manifest.provider_target,
        "descriptor": str(manifest.descriptor_path),
        "versions": versions,
    }


def shadow(server: BrokerView, params: Mapping[str, Any], client: bytes = b"") -> dict[str, Any]:
    """The result of a shadow check: how far a kernel's output was from a reference kernel's on the same inputs.

    route: the call's encoded Route message; kernel_id, reference: kernel ids; error: as in ipc/vocabulary/numerics.py.
    """
    body, kernel_id, reference, error = (params.get(name) for name in ("route", "kernel_id", "reference", "error"))
    if not isinstance(body, bytes) or type(error) is not float or error < 0:
        raise InvalidArgument("shadow needs `route`, an encoded route message, and `error`, a float of 0 or more")
    spec = CallSpec.parse(body)
    kernels = {k.kernel_id for c in server.state.capabilities.values() for k in c.ops.get(spec.op, ())}
    for name, given in (("kernel_id", kernel_id), ("reference", reference)):
        if not isinstance(given, str) or given not in kernels:
            known = ", ".join(sorted(kernels)) or "none"
            raise InvalidArgument(f"{name} is {given!r:.80}; kernels of {spec.op}: {known}")
    comparison = Comparison(Subject.of(str(kernel_id), spec), str(reference), error)
    server.handle(ev.ShadowCompared(comparison, client, body))
    return {"is_beyond": comparison.is_beyond}


def sample(server: BrokerView, params: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the inputs of a call should run once more, beside it, on a kernel that is little known: that kernel and
    its backend, or "" when policy gives no time for that (`tune_budget`), it is used up, or nothing is left to learn.

    route: the call's encoded Route message; runs: how many times it would run, 1 if left out.
    """
    body, runs = params.get("route"), params.get("runs", 1)
    if not isinstance(body, bytes) or type(runs) is not int or not 0 < runs <= MAX_SAMPLE_RUNS:
        raise InvalidArgument(f"sample needs `route`, an encoded route message; `runs` is 1 to {MAX_SAMPLE_RUNS}")
    engine, now_s = server.state.engine, time.monotonic()
    spec, ranked, _ = server.state.explain(body, now_s)
    accepted = {v.kernel_id: v for v in ranked if v.is_accepted and not v.transforms and not v.is_last_resort}
    if len(accepted) < 2 or spec.pinned:
        return {"backend": "", "kernel_id": ""}
    chosen, *others = accepted
    key = engine.context(spec).perf_key()
    tuning = server.tuning
    found = next_sample(
        [Usage(body, key, 1, chosen, tuple(others))],
        engine.perf,
        now_s,
        share=engine.policy.tune_budget,
        spent_s=tuning.spent_s,
        elapsed_s=now_s - tuning.since_s,
    )
    if found is None:
        return {"backend": "", "kernel_id": ""}
    known = engine.perf.stat(found.kernel_id, key) or engine.perf.stat(chosen, key)
    tuning.spent_s += runs * known.median_us / 1e6 if known is not None else 0.0
    return {"backend": accepted[found.kernel_id].backend, "kernel_id": found.kernel_id}


def lift(server: BrokerView, params: Mapping[str, Any], client: bytes = b"") -> dict[str, Any]:
    """Whether the asking client may launch a route's calls itself (docs/lifting.md). `state`: "ready", with what to
    `get_lifted`, "here", "pending", "later", or "refused" with a reason.

    route: the number of one of its routes; alignments: in bytes, of the address of each input and output.
    """
    return server.lifts.ask(client, params)


def lift_ahead(
    server: BrokerView, params: Mapping[str, Any], client: bytes = b""
) -> Generator[None, None, dict[str, Any]]:
    """As `lift` for calls that will come, as a route's tensors grow: `calls` has the answers, none while its own
    call is not lifted.

    route, alignments: as of `lift`; grows: for each input and output what one call adds to [shape, strides], or None;
    first, count: from which call on, the next one being 1, and how many; forms: whether an answer that is ready has the
    packed `form`, too.
    """
    return server.lifts.ask_ahead(client, params)


def lift_fault(server: BrokerView, params: Mapping[str, Any], client: bytes = b"") -> dict[str, Any]:
    """The asking client has lost a GPU. numbers: of the lifted calls that it launched there last. They run in their
    workers from now on."""
    return server.lifts.note_fault(client, params)


OF_CLIENTS: dict[str, Callable[[BrokerView, Mapping[str, Any], bytes], Any]] = {
    "explain": explain,
    "shadow": shadow,
    "lift": lift,
    "lift_ahead": lift_ahead,
    "lift_fault": lift_fault,
}
METHODS: dict[str, Callable[[BrokerView, Mapping[str, Any]], Any]] = {
    "status": status,
    "compile": compile_ahead,
    "decisions": decisions,
    "explain": explain,
    "health": health,
    "last_calls": last_calls,
    "learn": learn,
    "reserve": reserve,
    "free": free,
    "lift": lift,
    "lift_ahead": lift_ahead,
    "lift_fault": lift_fault,
    "load_table": load_table,
    "policy": policy,
    "provider": provider,
    "readiness": readiness,
    "reset": reset,
    "sample": sample,
    "settings": settings,
    "shadow": shadow,
    "stay": stay,
    "shutdown": shutdown,
    "waits": waits,
    "solve": solve,
    "ping": ping,
    "metrics": metrics,
    "serving": serving,
    "plan": plan,
    "plan_choice": plan_choice,
    "keep_plan_choice": keep_plan_choice,
    "locks": locks,
    **ROLLOUTS,
    **RESTARTS,
    **STEERING,
}
