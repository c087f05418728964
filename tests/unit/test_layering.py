"""Who may import whom, as data. Reads the source; runs nothing."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# package -> (our packages, third-party modules). "" is `layerzero` itself, for its version.
MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    "ipc": (set(), {"msgpack", "zmq"}),
    "capabilities": ({"ipc"}, {"pydantic"}),
    # What is built is what a broker would take: descriptors have one reader, which is pure.
    "envs": ({"ipc", "capabilities"}, {"packaging", "platformdirs", "pydantic", "rich", "typer"}),
    "workers": ({"ipc"}, {"msgpack", "zmq"}),
    "broker": (
        {"", "ipc", "capabilities", "envs"},
        {"msgpack", "platformdirs", "pydantic", "pydantic_settings", "yaml", "zmq"},
    ),
    "client": ({"", "ipc"}, {"ml_dtypes", "numpy", "rich", "zmq"}),
}
# Files that may import more than their package.
EXTRA: dict[str, set[str]] = {
    "client/cli.py": {"platformdirs", "typer"},
    "client/cli_bisect.py": {"layerzero.envs"},
    # Which backends from outside may be built is a matter of policy, which the broker's code reads.
    "client/cli_env.py": {"layerzero.broker", "layerzero.envs"},
    "client/cli_matrix.py": {"layerzero.envs"},
    # A policy file that keeps the broker from starting is checked with the broker's code, without a broker.
    "client/cli_policy.py": {"layerzero.broker"},
    "client/facade/__init__.py": {"layerzero.client"},
    "client/in_process.py": {"layerzero.workers"},
    "envs/matrix/child_tests.py": {"pytest"},
    "envs/matrix/inside/lz_matrix_inside.py": {"pytest"},
    "envs/matrix/pytest_plugin.py": {"pytest"},
    "client/isolated.py": {"layerzero.envs"},
    "client/local.py": {"layerzero.workers"},
}
# Modules that only these files of a package may import.
ONLY_IN: dict[tuple[str, str], set[str]] = {
    ("ipc", "zmq"): {"ipc/keys.py", "ipc/sockets.py"},
    ("ipc", "msgpack"): {"ipc/plain.py"},
    ("client", "zmq"): {"client/link.py", "client/remote.py"},
    ("broker", "yaml"): {"broker/policy_source.py"},
    ("broker", "zmq"): {"broker/remote.py", "broker/routers.py"},
    ("broker", "subprocess"): {"broker/supervisor.py"},
    ("broker", "sqlite3"): {"broker/perf_store.py"},
    # Bytes of other processes are parsed in ipc.
    ("broker", "struct"): set(),
    ("client", "struct"): {"client/array_recognition.py"},  # sizes of C's types
    ("workers", "struct"): set(),
}
# The core decides and does nothing else: no clock, no files, no sockets.
PURE = (
    "broker/actions.py",
    "broker/admission.py",
    "broker/aftermath.py",
    "broker/agenda.py",
    "broker/answers.py",
    "broker/bells.py",
    "broker/blame.py",
    "broker/blocks.py",
    "broker/call_fsm.py",
    "broker/calls.py",
    "broker/certification.py",
    "broker/closing.py",
    "broker/compilation.py",
    "broker/compiling.py",
    "broker/decisions.py",
    "broker/dispatch_table.py",
    "broker/engine.py",
    "broker/enqueued.py",
    "broker/events.py",
    "broker/explain.py",
    "broker/fleet.py",
    "broker/health.py",
    "broker/leases.py",
    "broker/limits.py",
    "broker/loans.py",
    "broker/perf.py",
    "broker/plain_data.py",
    "broker/planner.py",
    "broker/poison.py",
    "broker/policy.py",
    "broker/policy_rules.py",
    "broker/policy_values.py",
    "broker/records.py",
    "broker/rings.py",
    "broker/selection.py",
    "broker/sessions.py",
    "broker/settling.py",
    "broker/shadow.py",
    "broker/signatures.py",
    "broker/state.py",
    "broker/tuning.py",
    "broker/turns.py",
    "broker/waiting.py",
    "broker/unreachable.py",
    "broker/worker_fsm.py",
    "capabilities/compile_unit.py",
    "capabilities/context.py",
    "capabilities/device.py",
    "capabilities/fixes.py",
    "capabilities/match.py",
    "capabilities/mends.py",
    "capabilities/reasons.py",
)
# What the core may use of ipc: values and arithmetic. No page is mapped, no library loaded, no descriptor touched.
IPC_VALUES = {
    f"ipc/{name}.py"
    for name in (
        "cuda_handles",
        "cuda_offer",
        "errors",
        "messages",
        "numerics",
        "ops",
        "order_words",
        "plain",
        "policy",
        "ring_words",
        "shape_class",
        "tensors",
        "wire",
        "worker_codes",
    )
}
PURE_STDLIB = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "difflib",
    "enum",
    "fnmatch",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "pathlib",  # a path is a value, too
    "random",
    "re",
    "typing",
}
# What turns bytes into code or objects into anything. No peer's bytes may come near it.
BANNED_MODULES = {"cloudpickle", "dill", "imp", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput"}
LOADS_CODE = {"import_module", "spec_from_file_location", "exec_module"}
MAY_LOAD_CODE = {"client/facade/__init__.py", "envs/matrix/runner.py", "workers/boot.py"}

DRIVER_FUNCTION = re.compile(r"libcuda\.so.*|cu[A-Z][a-z]\w*")

FILES = sorted(path.relative_to(ROOT).as_posix() for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def tree(file: str) -> ast.Module:
    """What is copied into foreign environments must parse on the oldest Python there."""
    oldest = (3, 10) if file.startswith(("ipc/", "workers/")) else (3, 11)
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), file, feature_version=oldest)


def imported(node: ast.AST) -> Iterator[str]:
    """Full names of the modules that code imports; relative imports are ruff's to refuse."""
    for one in ast.walk(node):
        if isinstance(one, ast.Import):
            yield from (alias.name for alias in one.names)
        elif isinstance(one, ast.ImportFrom) and one.module == "layerzero":
            names = [alias.name for alias in one.names]
            yield from ("layerzero" if name.startswith("__") else f"layerzero.{name}" for name in names)
        elif isinstance(one, ast.ImportFrom):
            yield one.module or "."


@pytest.mark.parametrize("file", FILES)
def test_imports_stay_in_layer(file: str) -> None:
    """A file imports the stdlib, its own package, and what the tables grant."""
    package = file.partition("/")[0]
    ours, third_party = MAY_IMPORT[package]
    extra = EXTRA.get(file, set())
    for name in imported(tree(file)):
        top, _, rest = name.partition(".")
        layer = rest.partition(".")[0]
        if top == "layerzero":
            is_allowed = layer in ours | {package} or f"layerzero.{layer}" in extra
        elif file.startswith(("workers/providers/", "envs/matrix/probes/")):
            is_allowed = top not in BANNED_MODULES
        else:
            is_allowed = top in sys.stdlib_module_names | third_party | extra
        assert is_allowed, f"{file}: {package} may not import {name}"
        only = ONLY_IN.get((package, top))
        assert only is None or file in only, f"{file}: {top} belongs into {only}"


@pytest.mark.parametrize("file", PURE)
def test_core_imports_nothing_that_does_io(file: str) -> None:
    """What it decides must depend on its events alone, or the simulator proves nothing."""
    outside = {name for name in imported(tree(file)) if not name.startswith(("layerzero.", "pydantic"))}
    assert {name.partition(".")[0] for name in outside} <= PURE_STDLIB


@pytest.mark.parametrize("file", sorted({*(file for file in PURE if file.startswith("broker/")), *IPC_VALUES}))
def test_core_uses_only_values_of_ipc(file: str) -> None:
    """For the constant of how many workers sign an offer, the core once loaded ctypes and all of the CUDA driver."""
    code = tree(file)
    used = {name.removeprefix("layerzero.ipc.") for name in imported(code) if name.startswith("layerzero.ipc.")}
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and node.module == "layerzero.ipc":
            used |= {alias.name for alias in node.names}
    assert {f"ipc/{name}.py" for name in used} <= IPC_VALUES
    if file in IPC_VALUES:
        outside = {name.partition(".")[0] for name in imported(code) if not name.startswith("layerzero.ipc")}
        assert outside <= PURE_STDLIB | {"msgpack", "struct"}


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("workers/providers/")])
def test_provider_imports_its_library_when_it_is_loaded(file: str) -> None:
    """Listing the providers must not load any library."""
    code = tree(file)
    code.body = [n for n in code.body if not isinstance(n, ast.FunctionDef | ast.ClassDef) and not is_type_checking(n)]
    for name in imported(code):
        assert name.partition(".")[0] in sys.stdlib_module_names | {"layerzero"}, f"{file}: {name} at import time"


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@pytest.mark.parametrize("file", FILES)
def test_nothing_turns_bytes_into_code(file: str) -> None:
    """pickle over a socket, eval of a manifest, a shell around a name: each has been somebody's CVE."""
    code = tree(file)
    for name in imported(code):
        assert name.partition(".")[0] not in BANNED_MODULES, f"{file}: {name}"
    for node in ast.walk(code):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in BANNED_CALLS, f"{file}:{node.lineno}: {called}"
        assert called.rpartition(".")[2] not in LOADS_CODE or file in MAY_LOAD_CODE, f"{file}:{node.lineno}: {called}"
        for keyword in node.keywords:
            is_shell = keyword.arg == "shell" and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            )
            assert not is_shell, f"{file}:{node.lineno}: shell=True"


CUDA_DRIVER = {"ipc/cuda.py", "ipc/cuda_abi.py", "ipc/cuda_library.py"}


@pytest.mark.parametrize("file", [file for file in FILES if file not in CUDA_DRIVER])
def test_one_module_calls_the_cuda_driver(file: str) -> None:
    """The rest speaks of memory and order; a second caller would need all the care of the first."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not DRIVER_FUNCTION.fullmatch(node.value), f"{file}:{node.lineno}: {node.value}"


@pytest.mark.parametrize("file", [file for file in FILES if file != "ipc/plain.py"])
def test_one_module_reads_msgpack(file: str) -> None:
    """It bounds how deep a value is and what its keys are; a second reader would take what this one refuses."""
    assert not [node for node in ast.walk(tree(file)) if isinstance(node, ast.Attribute) and node.attr == "unpackb"]


@pytest.mark.parametrize("file", [file for file in FILES if "yaml" in set(imported(tree(file)))])
def test_yaml_is_read_with_the_safe_loader_only(file: str) -> None:
    """The other loaders build any object that a file names; so do the functions that choose one by themselves."""
    used = {ast.unparse(node) for node in ast.walk(tree(file)) if isinstance(node, ast.Attribute)}
    of_yaml = {name for name in used if name.startswith("yaml.") and name.count(".") == 1}
    harmless = {"yaml.Node", "yaml.ScalarNode", "yaml.SequenceNode", "yaml.MappingNode"}
    assert of_yaml - harmless - {"yaml.YAMLError", "yaml.MarkedYAMLError"} == {"yaml.SafeLoader"}


def test_tables_name_files_that_exist() -> None:
    """An exception that outlives its file would hide the next one."""
    named = {*EXTRA, *PURE, *IPC_VALUES, *MAY_LOAD_CODE, *(file for files in ONLY_IN.values() for file in files)}
    assert named <= set(FILES)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import os.path, zmq", ["os.path", "zmq"]),
        ("from layerzero import broker, __version__", ["layerzero.broker", "layerzero"]),
        ("def f():\n    from layerzero.broker import state", ["layerzero.broker"]),
    ],
)
def test_the_reader_sees_every_form_of_import(source: str, names: list[str]) -> None:
    """A test that overlooks a form would pass what it should refuse."""
    assert list(imported(ast.parse(source))) == names
