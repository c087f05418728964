"""A solved dispatch table: per sort of device and kind of call, a decision tree over the extents that names the fastest
kernel. Pure.

lz.solve makes one from measurements; Engine.rank asks it. docs/plans.md has the file's form.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from layerzero.capabilities.context import DATA_ATTRS, SelectionContext, has_dense_rows
from layerzero.capabilities.device import DeviceSpec
from layerzero.ipc.errors import ConfigError, InvalidArgument
from layerzero.ipc.vocabulary.tensors import TensorSpec

SCHEMA_VERSION = "2.0"
CPU = "cpu"  # as a place
REACH = 2  # a call is served when no extent differs from those of a measured one by more than this factor
TIE_SHARE = 0.02  # times that differ by less are equal: the rest is noise and would only split buckets
MAX_POINTS = 1024  # of one table; building it may keep the broker for half a second
MAX_TEXT_BYTES = 1 << 24

Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Extent = Annotated[int, Field(ge=0)]
Id = Annotated[str, Field(min_length=1, max_length=200)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class Hardware(_Model):
    """What the measured times depend on besides backends and their environments. Of a GPU its name and architecture
    count, not which one it is: those of a machine that are alike share their part of a table."""

    device_uuid: str = ""  # of a CPU
    device_name: str = ""  # of a GPU
    isa: tuple[str, ...] = ()  # instruction sets of a CPU
    sm: int | None = None  # CUDA compute capability, 10 * major + minor
    driver: str = ""

    @classmethod
    def of(cls, device: DeviceSpec) -> Hardware:
        is_cpu = device.device_type == "cpu"
        return cls(
            device_uuid=device.device_uuid if is_cpu else "",
            device_name="" if is_cpu else device.device_name,
            isa=device.isa,
            sm=device.sm_version,
            driver=device.driver_version,
        )


def place_of(device: DeviceSpec) -> str:
    """The part of a table that is about a device: equal for GPUs of one name and architecture."""
    if device.device_type == "cpu":
        return CPU
    return f"{device.device_type} {device.device_name} sm_{device.sm_version}"


def hardware_of(devices: Iterable[DeviceSpec]) -> dict[str, Hardware]:
    """What a machine with these devices has, by place."""
    return {place_of(device): Hardware.of(device) for device in devices}


class _Conditions(_Model):
    created: str  # ISO 8601, UTC
    layerzero_version: str
    capability_hashes: dict[str, str]
    env_ids: dict[str, str]
    command: str  # makes the table anew


class Header(_Conditions):
    """Where and with what a table was measured: `hardware` by place (`place_of`), of those that it has calls of.
    `capability_hashes` and `env_ids` have the backends that took part."""

    hardware: dict[Id, Hardware]


@dataclass(frozen=True)
class Measurement:
    """Median kernel time, in microseconds, of each kernel that accepts a call; keys as by `group_of`, `features_of`,
    `place_of`."""

    group: str
    features: Mapping[str, int]
    us: Mapping[str, float]
    place: str = CPU


class Point(_Model):
    """A measured call: its extents, in the order of its group's features, and the times."""

    extents: tuple[Extent, ...]
    us: dict[Id, Time]

    @model_validator(mode="after")
    def _is_measured(self) -> Point:
        if not self.us:
            raise ValueError("a point without any time")
        return self

    def is_near(self, extents: Sequence[int]) -> bool:
        for a, b in zip(extents, self.extents, strict=True):  # noqa: SIM110 - all() of a generator takes thrice as long
            if a > REACH * b or b > REACH * a:
                return False
        return True


class Leaf(_Model):
    kernel_id: Id


class Split(_Model):
    """Calls whose feature is below the threshold go on at the next node, others at node number `otherwise`."""

    feature: Annotated[int, Field(ge=0)]
    below: Annotated[int, Field(gt=0)]
    otherwise: Annotated[int, Field(gt=0)]


class Group(_Model):
    """Calls that differ in extents alone. `nodes` is the tree in preorder, from node 0."""

    features: tuple[Id, ...]
    nodes: Annotated[tuple[Split | Leaf, ...], Field(min_length=1)]
    points: Annotated[tuple[Point, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_a_tree(self) -> Group:
        """Preorder with forward links only, every node reached once: a lookup ends."""
        pending = [0]
        for number, node in enumerate(self.nodes):
            if not pending or pending.pop() != number:
                raise ValueError(f"node {number} is not where a tree in preorder has it")
            if isinstance(node, Split):
                if node.feature >= len(self.features):
                    raise ValueError(f"node {number} reads feature {node.feature} of {len(self.features)}")
                pending += [node.otherwise, number + 1]
        if pending:
            raise ValueError(f"node {pending[-1]} is missing")
        for point in self.points:
            if len(point.extents) != len(self.features):
                raise ValueError(f"a point has {len(point.extents)} extents for {len(self.features)} features")
        return self

    def lookup(self, extents: Sequence[int]) -> str | None:
        if not any(point.is_near(extents) for point in self.points):
            return None
        number = 0
        while isinstance(node := self.nodes[number], Split):
            number = number + 1 if extents[node.feature] < node.below else node.otherwise
        return node.kernel_id


class _File(_Model):
    """The table as it is written. `checksum` is of everything else."""

    schema_version: Literal["2.0"]
    checksum: str
    header: Header
    groups: dict[Id, dict[str, Group]]

    @model_validator(mode="after")
    def _has_conditions(self) -> _File:
        bare = sorted(self.groups.keys() ^ self.header.hardware.keys())
        if bare:
            raise ValueError(f"{', '.join(bare)}: hardware without calls, or calls without hardware")
        return self

    @property
    def table(self) -> DispatchTable:
        return DispatchTable(self.header, self.groups)


class _FirstHeader(_Conditions):
    hardware: Hardware


class _FirstFile(_Model):
    """As version 0.1 wrote it, when all tables were of the CPU."""

    schema_version: Literal["1.0"]
    checksum: str
    header: _FirstHeader
    groups: dict[str, Group]

    @property
    def table(self) -> DispatchTable:
        kept = {name: getattr(self.header, name) for name in _Conditions.model_fields}
        return DispatchTable(Header(hardware={CPU: self.header.hardware}, **kept), {CPU: self.groups})


@dataclass(frozen=True)
class DispatchTable:
    """`lookup` names the kernel that was fastest for calls like this one. `groups` are by place and `group_of`."""

    header: Header
    groups: Mapping[str, Mapping[str, Group]]

    def covers(self, device: DeviceSpec) -> bool:
        """Whether it has calls of such a device at all."""
        return place_of(device) in self.groups

    def lookup(self, context: SelectionContext) -> str | None:
        """None: no call like it was measured, or none within a factor of two in every extent."""
        group = self.groups.get(place_of(context.device), {}).get(group_of(context))
        if group is None:
            return None
        features = features_of(context)
        if tuple(features) != group.features:
            return None
        return group.lookup(tuple(features.values()))

    @property
    def trees(self) -> list[Group]:
        """One for each kind of calls and place."""
        return [group for groups in self.groups.values() for group in groups.values()]

    @property
    def buckets(self) -> int:
        """Leaves of all trees."""
        return sum(isinstance(node, Leaf) for group in self.trees for node in group.nodes)

    def save(self) -> str:
        """The file's text: JSON, the same for the same table."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "header": self.header.model_dump(mode="json"),
            "groups": {
                place: {key: group.model_dump(mode="json") for key, group in sorted(groups.items())}
                for place, groups in sorted(self.groups.items())
            },
        }
        return json.dumps({"checksum": _checksum(content), **content}, indent=1) + "\n"


# --- what a table knows a call by


def group_of(context: SelectionContext) -> str:
    """Equal for calls that differ in extents alone: op, dtypes, memory, attributes. Readable and stable."""
    parts = [context.op]
    parts += [f"{name}:{_kind(spec)}" for name, spec in context.given.items()]
    parts += [f"->{_kind(spec)}" for spec in context.outputs]
    parts += [f"{name}={context.attrs[name]!r}" for name in sorted(context.attrs) if name not in DATA_ATTRS]
    if not context.has_default_scale:
        parts.append("scale=own")
    return " ".join(parts)


def features_of(context: SelectionContext) -> dict[str, int]:
    """The extents of the inputs by name: {"x.0": 8, "x.1": 1024}."""
    return {f"{name}.{dim}": extent for name, spec in context.given.items() for dim, extent in enumerate(spec.shape)}


def _kind(spec: TensorSpec) -> str:
    memory = "" if spec.is_contiguous else "/rows" if has_dense_rows(spec) else "/strided"
    return f"{spec.dtype}[{spec.ndim}]{memory}"


# --- making one


def build(measurements: Iterable[Measurement], header: Header) -> DispatchTable:
    """A table in which each measured call finds its fastest kernel, or one within TIE_SHARE of it.

    Neighbouring calls share a leaf wherever one kernel serves them all so. `header` has the hardware of all places that
    were measured. Raises InvalidArgument for measurements that cannot be used.
    """
    grouped: dict[tuple[str, str], dict[tuple[int, ...], dict[str, float]]] = {}
    names: dict[tuple[str, str], tuple[str, ...]] = {}
    for measured in measurements:
        at = (measured.place, measured.group)
        features = names.setdefault(at, tuple(measured.features))
        if tuple(measured.features) != features:
            raise InvalidArgument(f"{measured.group}: features {list(measured.features)}, before {list(features)}")
        times = grouped.setdefault(at, {}).setdefault(tuple(measured.features.values()), {})
        for kernel_id, us in measured.us.items():  # of a call that was measured twice, the less disturbed time
            times[kernel_id] = min(us, times.get(kernel_id, math.inf))
    count = sum(map(len, grouped.values()))
    if not 0 < count <= MAX_POINTS:
        raise InvalidArgument(f"{count} different calls were measured; a dispatch table takes 1 to {MAX_POINTS}")
    try:
        groups: dict[str, dict[str, Group]] = {}
        for (place, key), times_of in grouped.items():
            points = [Point(extents=extents, us=dict(times_of[extents])) for extents in sorted(times_of)]
            tree = Group(features=names[place, key], nodes=tuple(_grow(points, 0)), points=tuple(points))
            groups.setdefault(place, {})[key] = tree
    except ValidationError as exc:
        raise InvalidArgument(f"a measurement cannot be used: {_first(exc)}") from exc
    return DispatchTable(header, groups)


def _grow(points: Sequence[Point], number: int) -> list[Split | Leaf]:
    """The tree of these points in preorder; its first node has this number."""
    totals = _Totals()
    for point in points:
        totals.add(point)
    good = [kernel_id for kernel_id, bad in totals.misfits.items() if totals.seen[kernel_id] == len(points) and not bad]
    if good:
        return [Leaf(kernel_id=min(good, key=lambda k: (totals.loss[k], k)))]
    feature, below = _best_split(points)
    low = _grow([p for p in points if p.extents[feature] < below], number + 1)
    otherwise = number + 1 + len(low)
    high = _grow([p for p in points if p.extents[feature] >= below], otherwise)
    return [Split(feature=feature, below=below, otherwise=otherwise), *low, *high]


class _Totals:
    """How well each kernel would serve a set of points: relative time lost against each point's fastest."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: dict[str, int] = {}
        self.loss: dict[str, float] = {}
        self.misfits: dict[str, int] = {}  # points where it is not among the fastest

    def add(self, point: Point) -> None:
        self.count += 1
        fastest_us = min(point.us.values())
        for kernel_id, us in point.us.items():
            self.seen[kernel_id] = self.seen.get(kernel_id, 0) + 1
            self.loss[kernel_id] = self.loss.get(kernel_id, 0.0) + us / fastest_us - 1
            self.misfits[kernel_id] = self.misfits.get(kernel_id, 0) + (us > (1 + TIE_SHARE) * fastest_us)

    @property
    def cost(self) -> tuple[int, float]:
        """With the best single kernel: points that it serves badly or not at all, then time lost."""
        return min(
            (self.misfits[kernel_id] + self.count - seen, self.loss[kernel_id]) for kernel_id, seen in self.seen.items()
        )


def _best_split(points: Sequence[Point]) -> tuple[int, int]:
    """The feature and threshold after which one kernel on either side loses least."""
    best: tuple[tuple[int, float], int, int] | None = None
    for feature in range(len(points[0].extents)):
        order = sorted(points, key=lambda p: p.extents[feature])
        if order[0].extents[feature] == order[-1].extents[feature]:
            continue
        after = []
        totals = _Totals()
        for point in reversed(order[1:]):
            totals.add(point)
            after.append(totals.cost)
        totals = _Totals()
        for (low, high), rest in zip(itertools.pairwise(order), reversed(after), strict=True):
            totals.add(low)
            a, b = low.extents[feature], high.extents[feature]
            if a == b:
                continue
            mine = totals.cost
            cost = (mine[0] + rest[0], mine[1] + rest[1])
            if best is None or cost < best[0]:
                best = cost, feature, math.isqrt(a * b) + 1  # above a, at most b, halfway in powers
    assert best is not None, "different points differ in a feature"
    return best[1:]


# --- reading one


def load(
    text: str,
    origin: str,
    hardware: Mapping[str, Hardware],
    capability_hashes: Mapping[str, str],
    env_ids: Mapping[str, str],
    *,
    layerzero_version: str,
) -> DispatchTable:
    """A table from its file's text, for the machine (`hardware_of`) and backends given. Raises ConfigError naming each
    difference."""
    table = parse(text, origin)
    found = differences(table.header, hardware, capability_hashes, env_ids, layerzero_version=layerzero_version)
    if found:
        lines = "".join(f"\n  {line}" for line in found)
        raise ConfigError(
            f"{origin}: the dispatch table was measured under other conditions:{lines}\n"
            f"make it anew: {table.header.command}"
        )
    return table


def parse(text: str, origin: str) -> DispatchTable:
    """A table from its file's text, whatever it was measured on. Raises ConfigError."""
    again = "make it anew with lz solve"
    if len(text) > MAX_TEXT_BYTES:
        raise ConfigError(f"{origin}: {len(text)} characters; allowed: {MAX_TEXT_BYTES}; {again}")
    try:
        content = json.loads(text)
        is_first = isinstance(content, dict) and content.get("schema_version") == "1.0"
        found: _File | _FirstFile = (_FirstFile if is_first else _File).model_validate_json(text)
    except ValidationError as exc:
        raise ConfigError(f"{origin}: not a dispatch table: {_first(exc)}; {again}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{origin}: not JSON: {exc}; {again}") from exc
    del content["checksum"]
    expected = _checksum(content)
    if found.checksum != expected:
        raise ConfigError(
            f"{origin}: its checksum is {found.checksum:.16}, its content's {expected:.16}: it was changed or damaged; "
            f"{again}"
        )
    return found.table


def differences(
    header: Header,
    hardware: Mapping[str, Hardware],
    capability_hashes: Mapping[str, str],
    env_ids: Mapping[str, str],
    *,
    layerzero_version: str,
) -> list[str]:
    """Each condition of the table that does not hold here, with both values."""
    pairs: list[tuple[str, object, object]] = []
    for place, then in header.hardware.items():
        here = hardware.get(place)
        if here is None:
            pairs.append(("devices", place, ", ".join(hardware)))
            continue
        prefix = "" if place == CPU else f"{place}: "
        pairs += [(f"{prefix}{name}", getattr(then, name), getattr(here, name)) for name in Hardware.model_fields]
    pairs.append(("layerzero version", header.layerzero_version, layerzero_version))
    pairs += [(f"descriptor of {b}", value, capability_hashes.get(b)) for b, value in header.capability_hashes.items()]
    pairs += [(f"environment of {b}", value, env_ids.get(b)) for b, value in header.env_ids.items()]
    return [f"{what}: table {_show(then)}, here {_show(now)}" for what, then, now in pairs if then != now]


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return "none" if value in (None, "") else str(value)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _first(exc: ValidationError) -> str:
    first = exc.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']} (got {first.get('input')!r:.80})"
