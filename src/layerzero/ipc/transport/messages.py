"""Every message with a msgpack body: its fields, who sends it and what answers it.

A message is a record derived from Message. Unknown fields are ignored, unknown kinds and wrong types refused by name.
What is in a list or map that is a field is for its user to check. A change here is a change of docs/protocol.md.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from layerzero.ipc.records import named_record
from layerzero.ipc.transport.counter_messages import AddCounters, CountersAdded
from layerzero.ipc.transport.message import Message, decode, encode

__all__ = ["MESSAGES", "AddCounters", "CountersAdded", "Message", "decode", "encode"]


@named_record
class Hello(Message):
    """peer -> broker, first on the control socket. Answered by Welcome, Refused, or Challenge if there is a secret."""

    kind: ClassVar[str] = "hello"
    protocols: list[Any]  # of int, newest first
    role: str  # "client", "worker" or "agent"
    package: str  # package version, for messages to people
    pid: int
    ticket: bytes = b""  # worker: the capability it was started with
    nonce: bytes = b""  # client, agent: 32 random bytes from one that has the secret
    backend: str = ""  # agent: whose worker it keeps
    env: str = ""  # agent: id of what is installed there, as lz-env.json says
    source: str = ""  # agent: hash of its copy of our code, and of a provider of its own


@named_record
class Challenge(Message):
    """broker -> peer that has said hello. Answered by Proof."""

    kind: ClassVar[str] = "challenge"
    nonce: bytes


@named_record
class Proof(Message):
    """peer -> broker. Answered by Welcome or Refused."""

    kind: ClassVar[str] = "proof"
    mac: bytes  # ipc/transport/secret.py: Handshake.peer_mac


@named_record
class Welcome(Message):
    """broker -> peer. For a worker the control page travels with it as a file descriptor."""

    kind: ClassVar[str] = "welcome"
    protocol: int
    package: str
    broker: str  # incarnation
    broker_pid: int
    endpoint: str  # ZeroMQ address
    identity: bytes  # routing id to use there: 128 random bits, a capability
    number: int  # of this client or worker in this broker
    max_in_flight: int  # calls a client may have open at once
    timeout_s: float  # default for calls that give none
    mac: bytes = b""  # after a Challenge: ipc/transport/secret.py: Handshake.broker_mac
    has_joined: bool = False  # some workers are not the broker's children: they may outlive it
    counts: bool = False  # it takes a page of counters: AddCounters


@named_record
class Redirect(Message):
    """broker -> client of another user, in place of Welcome: that user has a broker of his own. Then the socket
    closes."""

    kind: ClassVar[str] = "redirect"
    path: str  # its control socket, absolute
    mac: bytes = b""  # as in Welcome


@named_record
class Refused(Message):
    """broker -> peer. The peer's last message was not accepted; after a Hello the socket closes."""

    kind: ClassVar[str] = "refused"
    error: dict[str, Any]


@named_record
class AddArena(Message):
    """client -> broker, with the arena's memfd. Answered by ArenaAdded or Refused."""

    kind: ClassVar[str] = "add_arena"
    arena: int
    nbytes: int


@named_record
class ArenaAdded(Message):
    """broker -> client."""

    kind: ClassVar[str] = "arena_added"
    arena: int


@named_record
class RetireArena(Message):
    """client -> broker: no open call uses this arena and none will. Not answered."""

    kind: ClassVar[str] = "retire_arena"
    arena: int


@named_record
class MapArena(Message):
    """broker -> worker, with the memfd, before the first RUN that uses it. Not answered."""

    kind: ClassVar[str] = "map_arena"
    client: int
    arena: int
    nbytes: int


@named_record
class UnmapArena(Message):
    """broker -> worker. Not answered."""

    kind: ClassVar[str] = "unmap_arena"
    client: int
    arena: int


@named_record
class ClientLeft(Message):
    """broker -> worker that has served users' functions to this client: no call of it is open, and none will come. Not
    answered."""

    kind: ClassVar[str] = "client_left"
    client: int


@named_record
class AddGpu(Message):
    """client -> broker, with the order page (ipc/shm/timeline_page.py) of its calls on a GPU, and the descriptor of
    the offered memory if its transport has one. Again, with the next transport, when no worker could use the last.
    Answered by GpuAdded or Refused."""

    kind: ClassVar[str] = "add_gpu"
    gpu: str  # UUID
    has_memops: bool  # the client's streams can write and wait for words of the page
    offer: dict[str, Any]  # ipc/cuda/offer.py: Offer


@named_record
class GpuAdded(Message):
    """broker -> client."""

    kind: ClassVar[str] = "gpu_added"
    gpu: str


@named_record
class MapGpu(Message):
    """broker -> worker, with the descriptors of AddGpu, before the first MapGpuArena of that client and GPU. The worker
    tries the offered memory and writes its sign at `slot` of it; a client on whose offer that fails gets NO_TRANSPORT
    for its calls. Not answered."""

    kind: ClassVar[str] = "map_gpu"
    client: int
    gpu: str
    slot: int  # of this start of this worker; the client finds its sign there
    has_memops: bool
    offer: dict[str, Any]


@named_record
class UnmapGpu(Message):
    """broker -> worker: the client has left, or makes another offer. Not answered."""

    kind: ClassVar[str] = "unmap_gpu"
    client: int
    gpu: str


@named_record
class AddGpuArena(Message):
    """client -> broker, with a descriptor if the handle's transport has one. Answered by ArenaAdded or Refused. Numbers
    are those of AddArena; `retire_arena` is for both."""

    kind: ClassVar[str] = "add_gpu_arena"
    arena: int
    handle: dict[str, Any]  # ipc/cuda/handles.py: ArenaHandle, of the same arena number


@named_record
class MapGpuArena(Message):
    """broker -> worker, as MapArena. `unmap_arena` is for both."""

    kind: ClassVar[str] = "map_gpu_arena"
    client: int
    arena: int
    handle: dict[str, Any]


@named_record
class AddLane(Message):
    """client -> broker, with the page; on a GPU with a ring. `lane` is of a Lease. Answered by LaneAdded or Refused."""

    kind: ClassVar[str] = "add_lane"
    lane: int
    gpu: str = ""  # UUID of the GPU that the lane's routes are on, or ""


@named_record
class LaneAdded(Message):
    """broker -> client, with the doorbell and the hearing end of the answer bell; on a GPU with the doorbell. `is_open`
    is false, and there are none, when the lane's worker is gone already."""

    kind: ClassVar[str] = "lane_added"
    lane: int
    is_open: bool


@named_record
class MapLane(Message):
    """broker -> worker, with the page, the doorbell and the ringing end of the answer bell; on a GPU with the ring and
    the doorbell. Not answered."""

    kind: ClassVar[str] = "map_lane"
    client: int
    lane: int
    gpu: str = ""  # as in AddLane


@named_record
class UnmapLane(Message):
    """broker -> worker. Not answered."""

    kind: ClassVar[str] = "unmap_lane"
    lane: int


@named_record
class Wake(Message):
    """broker -> worker: there are calls on a ring whose client has left. Not answered."""

    kind: ClassVar[str] = "wake"


@named_record
class Lift(Message):
    """broker -> worker: lift a kernel (docs/lifting.md). Answered by Lifted."""

    kind: ClassVar[str] = "lift"
    number: int
    call: bytes  # an encoded Prepare
    alignments: list[Any]  # of int: bytes, of each input and each output; 0 for an input that is left out
    seeds: list[Any]  # of int: of the inputs to run it on
    is_repeatable: bool = True  # `deterministic` of the kernel's descriptor: the same bits each time


@named_record
class Lifted(Message):
    """worker -> broker, with a memfd of a packed Specimen, or why there is none; number 0: of functions, no answer."""

    kind: ClassVar[str] = "lifted"
    number: int
    reason: str = ""  # a LiftReason; of number 0 MODULES_CHANGED or TRIAL_BEGUN
    detail: str = ""


@named_record
class GetLifted(Message):
    """client -> broker: hand over a lifted call, by the digest of its packed form, or machine code by its own. Answered
    by LiftedGiven or Refused."""

    kind: ClassVar[str] = "get_lifted"
    digest: str


@named_record
class LiftedGiven(Message):
    """broker -> client, with a descriptor to read the bytes from."""

    kind: ClassVar[str] = "lifted_given"
    digest: str
    nbytes: int


@named_record
class Keep(Message):
    """broker -> agent, after Welcome, with its backend's descriptor as a memfd. Answered by Probed if `probes`."""

    kind: ClassVar[str] = "keep"
    provider: str  # module name, or path of a .py file
    environ: dict[str, Any]  # variables of the worker; "{site}" and "{cache}" are places at the agent's
    defaults: dict[str, Any]  # variables of the worker that the agent's own win over
    probes: bool
    timeout_s: float  # of the probe: how long it may be in one case
    calls: dict[str, Any] = field(default_factory=dict)  # what the probe runs: dtypes by op; empty for all


@named_record
class Probed(Message):
    """agent -> broker, with what the probe's process wrote to its stdout as a memfd."""

    kind: ClassVar[str] = "probed"
    code: int  # exit code; negative: the signal it died of
    is_late: bool  # it was killed after its time
    seconds: float
    stderr_tail: str


@named_record
class CompileHere(Message):
    """broker -> agent: run a kernel once in a child, so that its caches have what the worker will need. One at a time.
    Answered by CompiledHere."""

    kind: ClassVar[str] = "compile_here"
    call: bytes  # an encoded Prepare
    timeout_s: float


@named_record
class CompiledHere(Message):
    """agent -> broker. Fields as in Probed."""

    kind: ClassVar[str] = "compiled_here"
    code: int
    is_late: bool
    seconds: float
    stderr_tail: str


@named_record
class StartWorker(Message):
    """broker -> agent. Answered by WorkerStarted, or WorkerEnded when that fails; later by WorkerEnded."""

    kind: ClassVar[str] = "start_worker"
    generation: int
    ticket: bytes
    failpoints: str


@named_record
class WorkerStarted(Message):
    """agent -> broker."""

    kind: ClassVar[str] = "worker_started"
    generation: int
    pid: int  # in the agent's own namespace: for people only


@named_record
class KillWorker(Message):
    """broker -> agent. The worker's WorkerEnded follows, unless that is on its way."""

    kind: ClassVar[str] = "kill_worker"
    generation: int


@named_record
class WorkerEnded(Message):
    """agent -> broker: the worker has been waited for, and what it had started was killed."""

    kind: ClassVar[str] = "worker_ended"
    generation: int
    code: int  # exit code; negative: the signal it died of
    stderr_tail: str
    oom: str = ""  # where the kernel killed it for lack of memory, and the limit there


@named_record
class Ping(Message):
    """broker -> agent. Answered by Pong."""

    kind: ClassVar[str] = "ping"
    number: int


@named_record
class Pong(Message):
    """agent -> broker."""

    kind: ClassVar[str] = "pong"
    number: int


@named_record
class Route(Message):
    """Body of ROUTE: a call signature in canonical form (ipc/vocabulary/ops.py), specs as TensorSpec.to_wire()."""

    kind: ClassVar[str] = "route"
    op: str
    inputs: list[Any]
    outputs: list[Any]
    attrs: dict[str, Any]
    backend: str = ""  # pinned backend, or ""
    policy: dict[str, Any] = field(default_factory=dict)
    next_ops: list[Any] = field(default_factory=list)  # ops that take this one's result
    device: str = ""  # UUID of the GPU that all tensors are on, or ""


@named_record
class RanHere(Message):
    """Body of RAN_HERE: `kernel_ns` of a kernel that ran in the client's process, or the error it ended in.
    `stays_out`: its backend will never run there."""

    kind: ClassVar[str] = "ran_here"
    kernel_id: str
    kernel_ns: int = 0
    error: dict[str, Any] = field(default_factory=dict)
    stays_out: bool = False


@named_record
class Prepare(Message):
    """Body of PREPARE: a call signature and the kernel that runs it."""

    kind: ClassVar[str] = "prepare"
    op: str
    kernel_id: str
    inputs: list[Any]
    outputs: list[Any]
    attrs: dict[str, Any]
    device: str = ""  # as in Route
    is_graph_safe: bool = False  # is_cuda_graph_safe of the kernel's descriptor: the worker may capture and replay it


@named_record
class Decision(Message):
    """Body of DECISION: who serves a route now. `candidates` as in SelectionReport."""

    kind: ClassVar[str] = "decision"
    kernel_id: str
    backend: str
    worker_pid: int
    copies_inputs: bool
    copies_outputs: bool
    candidates: list[Any]
    lane: str = "broker"  # a client's own: "express" under a lease, "in_process" under a RUN_IN_PROCESS grant
    shadow_rate: float = 0.0  # share of this route's calls that policy wants repeated on a reference
    offers_samples: bool = False  # policy gives time for tuning in the background: offer calls by `sample`
    slot: int = 0  # on a GPU: where the worker has left its sign (MapGpu)
    # Versions that are to be compared in calls that either serves: lists of backend, version, share of such calls.
    shadowed: list[Any] = field(default_factory=list)
    traced: float = 0.0  # share of this route's calls that policy wants recorded


@named_record
class Lease(Message):
    """Body of LEASE: calls of a route may go to `plan` on the express lane `lane`, as long as its page has `epoch`; and
    those of its `neighbours`, a Neighbourhood on the wire, if it has any."""

    kind: ClassVar[str] = "lease"
    lane: int
    plan: int
    epoch: int
    neighbours: list[Any] = field(default_factory=list)


@named_record
class Neighbours(Message):
    """Body of ALLOW: calls with other extents that the plan may be run for, a Neighbourhood on the wire."""

    kind: ClassVar[str] = "neighbours"
    neighbours: list[Any]


@named_record
class Outcome(Message):
    """Body of FAILED, and of DONE when attempts failed before or the call waited for a worker to start: the error, if
    any, the attempts, and for how long."""

    kind: ClassVar[str] = "outcome"
    error: dict[str, Any] = field(default_factory=dict)
    attempts: list[Any] = field(default_factory=list)
    candidates: list[Any] = field(default_factory=list)
    result: bytes = b""
    waited_s: float = 0.0


@named_record
class Request(Message):
    """Body of REQUEST: a method of the broker and its parameters."""

    kind: ClassVar[str] = "request"
    method: str
    params: dict[str, Any] = field(default_factory=dict)


@named_record
class Ready(Message):
    """Body of READY: what the provider loaded."""

    kind: ClassVar[str] = "ready"
    versions: dict[str, Any]
    kernels: list[Any]


MESSAGES: dict[str, type[Message]] = {cls.kind: cls for cls in Message.__subclasses__()}
