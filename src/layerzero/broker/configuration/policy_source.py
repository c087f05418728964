"""Where the broker's policy comes from: a YAML file, which may change while the broker runs, and its environment.

The only file that reads YAML, with PyYAML's SafeLoader and less than that allows: no tags, no anchors, no key twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from layerzero.broker.selection.policy import Layer, Policy, compose
from layerzero.broker.selection.policy_values import Known, Place
from layerzero.ipc import files
from layerzero.ipc.errors import ConfigError

MAX_FILE_BYTES = 64 * 1024  # half a second of PyYAML at worst
MAX_DEPTH = 32  # of brackets
MAX_INTEGER_BITS = 64
CHECK_S = 1.0  # how often the file is looked at
PATIENCE_S = 0.02  # so long the broker's loop waits for its thread: an ordinary file holds for the call that woke it
_HINT = "quote what begins with > < ! = * & or %"
_SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null")}

Stamp = tuple[int, int, int]  # mtime_ns, size, inode
_NEVER = ((-1, -1, -1), (-1, -1, -1))  # no file has it


class PolicySource:
    """The source of the policy in force, which is read at once. Raises ConfigError when that cannot be done.

    file: the policy file. is_optional: it need not exist. variables: layers of the environment
    (ipc/vocabulary/policy.py), which do not change. known: the names that a policy may use. record: what `lz env add`
    has written, if there is any; all else goes before it. on_read: called from another thread when `refresh` has
    something that it had no patience for."""

    def __init__(
        self,
        file: Path,
        *,
        is_optional: bool,
        variables: Sequence[Mapping[str, Any]],
        known: Known,
        record: Path | None = None,
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        self.file = file
        self.problem = ""  # why the file as it is now is not in force
        self._is_optional = is_optional
        self._variables = tuple(Layer(one["origin"], one["values"]) for one in variables)
        self._known = known
        self._asked: dict[str, Layer] = {}  # on top, by origin, as long as this broker runs
        self._check_at_s = 0.0
        self._record = record
        self.on_read = on_read
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="policy")
        self._reading: Future[Policy] | None = None
        self._stamp = self._stamps()
        self.policy = self._read(self._stamp)

    def describe(self, overlay: Mapping[str, Any]) -> dict[str, Any]:
        """The policy with a caller's overlay on top, as plain values. Raises InvalidArgument for a wrong overlay."""
        effective, known = self.policy.with_overlay(overlay), self._known
        return {
            "hash": effective.hash,
            "file": str(self.file),
            "problem": self.problem,
            "values": effective.describe(),
            "known": {"ops": list(known.ops), "kernels": dict(known.kernels), "backends": list(known.backends)},
        }

    def set_known(self, known: Known) -> Policy:
        """The names that a policy may use from now on, also one that a caller sets; files are read with them when they
        change. Returns the same policy with these names."""
        self._known = known
        self.policy = replace(self.policy, _known=known)
        return self.policy

    def ask(self, origin: str, values: Mapping[str, Any]) -> Policy:
        """The policy with these values on top from now on, in place of those of this origin; empty: without any. Raises
        ConfigError, and then nothing has changed."""
        asked = {name: layer for name, layer in self._asked.items() if name != origin}
        if values:
            asked[origin] = Layer(origin, dict(values))
        below = [layer for layer in self.policy.layers if layer not in self._asked.values()]  # in force, file or not
        self.policy = Policy.of(*below, *asked.values(), known=self._known)
        self._asked = asked
        if self._reading is not None:  # what a thread reads now is without them: the next look reads again
            self._reading, self._stamp = None, _NEVER
        return self.policy

    def asked(self, origin: str) -> Mapping[str, Any]:
        """The values of this origin that are on top now."""
        found = self._asked.get(origin)
        return {} if found is None else found.values

    def refresh(self, now_s: float) -> Policy | None:
        """The new policy when the file has changed, else None. A file that is broken now leaves the policy as it is and
        is a `problem`. Cheap enough for every turn of a loop: it looks once in CHECK_S, and a thread reads."""
        if self._reading is None:
            if now_s < self._check_at_s:
                return None
            self._check_at_s = now_s + CHECK_S
            stamp = self._stamps()
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            self._reading = self._thread.submit(self._read, stamp)
            if not wait((self._reading,), PATIENCE_S).done:
                self._reading.add_done_callback(lambda _: self.on_read())
        if not self._reading.done():
            return None
        reading, self._reading = self._reading, None
        try:
            self.policy = replace(reading.result(), _known=self._known)  # it may have grown since the reading began
        except ConfigError as exc:
            self.problem = f"{exc.message}\nthe policy from before stays in force"
            return None
        except Exception as exc:  # a file must not end a broker, be the fault ours
            self.problem = f"cannot be read: {type(exc).__name__}: {exc}\nthe policy from before stays in force"
            return None
        self.problem = ""
        return self.policy

    def close(self) -> None:
        """What is read now is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _stamps(self) -> tuple[Stamp | None, Stamp | None]:
        """The stamps of the record and of the file; None for one that is not there."""
        return None if self._record is None else _stamp(self._record), _stamp(self.file)

    def _read(self, stamp: tuple[Stamp | None, Stamp | None]) -> Policy:
        recorded, written = stamp
        if written is None and not self._is_optional:
            raise ConfigError(f"the policy file {self.file} does not exist")
        layers = [] if recorded is None or self._record is None else [load_layer(self._record)]
        layers += [] if written is None else [load_layer(self.file)]
        policy, problems = compose((*layers, *self._variables, *self._asked.values()), self._known)
        if policy is None:
            raise ConfigError("the policy is wrong\n" + "\n".join(problems), problems=problems)
        return policy


def _stamp(file: Path) -> Stamp | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def load_layer(file: Path) -> Layer:
    """A policy file as a layer, not yet checked. Raises ConfigError for what is not YAML."""
    return _load_layer(file, _stamp(file))


@functools.lru_cache(maxsize=4)
def _load_layer(file: Path, _: Stamp | None) -> Layer:
    """Kept while the file is the same: with each look at a backend from outside, policy is asked for its sources."""
    try:
        return parse_layer(files.read(file, MAX_FILE_BYTES).decode(), str(file))
    except OSError as exc:
        raise ConfigError(f"{file}: cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file}: not UTF-8: {exc}") from exc


def parse_layer(text: str, origin: str) -> Layer:
    """As `load_layer`, of text. `origin` names the file in messages."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return Layer(origin, {})
        reader = _Reader(loader)
        values = reader.value(root, ())
    except yaml.MarkedYAMLError as exc:
        line = f":{exc.problem_mark.line + 1}" if exc.problem_mark is not None else ""
        raise ConfigError(f"{origin}{line}: not YAML: {exc.problem or exc.context}; {_HINT}") from exc
    except yaml.YAMLError as exc:  # characters that YAML does not allow
        raise ConfigError(f"{origin}: not YAML: {str(exc).splitlines()[0]}") from exc
    return Layer(origin, values, reader.lines, tuple(reader.flaws))


class _Loader(yaml.SafeLoader):
    """A SafeLoader that takes MAX_DEPTH open brackets and as many indents and no more: PyYAML looks ahead over all
    brackets at each token, and how many levels it can walk depends on who has changed Python's recursion limit."""

    def fetch_flow_collection_start(self, kind: Any) -> None:
        if self.flow_level >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(kind)

    def add_indent(self, column: int) -> bool:
        if len(self.indents) >= MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=self.get_mark())
        return bool(super().add_indent(column))


class _Reader:
    """From YAML nodes to plain values, with the line of each place. What is not plain is a flaw, and left out."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self.lines: dict[Place, int] = {}
        self.flaws: list[tuple[int, str]] = []
        self._loader = loader
        self._seen: set[int] = set()

    def value(self, node: yaml.Node, place: Place) -> Any:
        self.lines.setdefault(place, _line(node))
        if id(node) in self._seen:
            self._complain(node, "anchors and aliases are not allowed; write the value again")
            return None
        self._seen.add(id(node))
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return dict(self._entries(node, place))
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self.value(item, (*place, i)) for i, item in enumerate(node.value)]
        if node.tag in _SCALARS:
            try:
                value = self._loader.construct_object(node)
            except (ValueError, OverflowError) as exc:
                self._complain(node, f"{node.value!r:.80}: {exc}")
                return None
            if type(value) is int and value.bit_length() > MAX_INTEGER_BITS:  # Python does not even show the largest
                self._complain(node, f"{node.value!r:.80}: an integer of more than {MAX_INTEGER_BITS} bits")
                return None
            return value
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        self._complain(node, f"a value of YAML's kind {kind!r:.80} is not allowed; {_HINT}")
        return None

    def _entries(self, node: yaml.MappingNode, place: Place) -> Iterator[tuple[str, Any]]:
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in _SCALARS:
                self._complain(key_node, "a key that is not a name")
                continue
            key = key_node.value
            if key in first_lines:
                self._complain(key_node, f"key {key!r:.80} is given twice, first in line {first_lines[key]}")
                continue
            first_lines[key] = self.lines[(*place, key)] = _line(key_node)
            yield key, self.value(value_node, (*place, key))

    def _complain(self, node: yaml.Node, message: str) -> None:
        self.flaws.append((_line(node), message))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
