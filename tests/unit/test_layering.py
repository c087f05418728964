"""Who may import whom, as data. Reads the source; runs nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest
from tests import structure
from tests.structure import SOURCE

# package -> (our packages, third-party modules).
MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    "ipc": (set(), {"msgpack", "zmq"}),
    "capabilities": ({"ipc"}, {"pydantic"}),
    # What is built is what a broker would take: descriptors have one reader, which is pure.
    "envs": (
        {"capabilities", "ipc"},
        {"cryptography", "huggingface_hub", "packaging", "platformdirs", "pydantic", "rich", "typer"},
    ),
    "workers": ({"ipc"}, {"msgpack", "zmq"}),
    "broker": (
        {"ipc", "capabilities", "envs"},
        {"msgpack", "platformdirs", "pydantic", "yaml", "zmq"},
    ),
    "client": ({"ipc"}, {"ml_dtypes", "numpy", "prometheus_client", "rich", "zmq"}),
    # What users of layerzero could have written themselves.
    "torch": ({""}, {"torch"}),
    # Functions of users, in environments that it builds and calls that it makes of arrays' memory.
    "functions": ({"client", "envs", "ipc"}, {"packaging"}),
    # As functions: of what clients have, and gloo in an environment of its own.
    "groups": ({"client", "envs", "functions", "ipc"}, {"numpy"}),
    "transformers": ({"", "ipc", "torch"}, {"tokenizers", "torch", "transformers"}),
    "text": ({""}, {"jinja2", "numpy"}),
    "rotary": ({"", "ipc"}, {"numpy"}),
    "paging": ({"ipc"}, {"numpy"}),
    "diffusers": ({"", "torch"}, {"diffusers", "torch"}),
    "engines": ({"", "ipc", "torch"}, {"flashinfer", "sglang", "torch", "vllm"}),
    # What people look at: of the broker by its questions, of files by their readers.
    "dashboard": ({"", "client", "envs", "ipc"}, {"anyio", "starlette", "uvicorn"}),
    "top": ({"", "client"}, {"rich", "textual"}),
    "otel": ({"", "client"}, {"opentelemetry"}),
    # Nodes of a Ray cluster: what a program with several machines could have written itself.
    "cluster": ({"client", "ipc"}, {"ray"}),
}
# Files and folders that may import more than their package. "" is `layerzero` itself.
EXTRA: dict[str, set[str]] = {
    "client/chaos": {""},
    "client/cli": {"", "envs", "platformdirs", "typer"},
    # A policy file that keeps the broker from starting is checked with the broker's code, without a broker.
    "client/cli/policy.py": {"broker", "rich"},
    "client/cli/replay_log.py": {"broker", "rich"},  # the core alone, on what was recorded
    "client/cli/cache.py": {"broker", "rich"},  # the store's files, without a broker
    "client/cli/compile_caches.py": {"broker"},
    "client/cli/lift.py": {"broker", "rich"},
    # Of measured times, which the broker keeps, the calls that were made.
    "client/cli/profile.py": {"broker", "capabilities", "rich"},
    "client/cli/cluster.py": {"cluster", "rich"},
    "client/cli/bisect_function.py": {"functions"},
    "client/cli/capsule.py": {"functions", "rich"},
    "client/cli/replay.py": {"functions"},  # whose calls leave capsules, too
    "client/cli/dashboard.py": {"cluster", "dashboard"},
    "client/cli/top.py": {"top"},
    # Which dtypes ops take is asked with the calls that certify kernels, by rules that the broker has.
    "client/cli/types.py": {"capabilities", "workers"},
    "groups/inside": {"torch"},  # runs in torch's environment, and imports it there
    "groups/nccl.py": {"torch"},  # of a process that has given its tensors
    "functions/capsule_script.py": {"numpy"},  # writes arrays of a capsule beside a script
    "functions/isolated.py": {"torch"},  # as_torch_op, when it is called
    # Which backends from outside may be built is a matter of policy, which the broker's code reads.
    "client/cli/env.py": {"broker"},
    "client/facade/default_session.py": {"cluster"},  # where lz.connect(cluster=) asks for it
    "client/session": {"workers"},  # in-process calls run providers as a worker does
    "client/tools/isolated.py": {"", "envs"},
    # The model that a kernel of onnxruntime is: the provider makes it, which imports its library only where it runs.
    "client/tools/onnx_script.py": {"workers"},
    "envs/matrix/child_tests.py": {"pytest"},
    "envs/matrix/inside/lz_call.py": {"", "workers"},  # which the environment under test has of us, if anything
    "envs/matrix/inside/lz_matrix_inside.py": {"pytest"},
    "envs/matrix/pytest_plugin.py": {"pytest"},
    # What was decided of calls, by which policy, and how that is printed.
    "torch/acceleration": {"client", "ipc"},
    "torch/backward.py": {"client"},  # what is computed in this process is told as lz.last_report() tells it
    "torch/elementwise.py": {"ipc"},  # what cat takes, and cast converts to
    "torch/quantized.py": {"ipc"},  # which dtypes and formats there are
    "torch/vision.py": {"ipc"},  # how windows slide, and what interpolation weighs
    "torch/running.py": {"ipc"},  # which variable takes it out
    "transformers/experts.py": {"client"},  # whether weights lie where workers reach them
    "torch/refusals.py": {"client"},  # under which policy and on which connection a call was refused
    "torch/calls.py": {"client"},  # torch's wish for deterministic kernels is a policy of the call
    "torch/tracing.py": {"client"},  # calls of lz functions in a program that is traced come to it
}
# Modules that only these folders and files of a package may import.
ONLY_IN: dict[tuple[str, str], set[str]] = {
    ("ipc", "zmq"): {"ipc/transport/keys.py", "ipc/transport/sockets.py"},
    ("ipc", "msgpack"): {"ipc/transport/plain.py"},
    ("client", "zmq"): {"client/connection"},
    ("client", "prometheus_client"): {"client/metrics"},
    ("envs", "cryptography"): {
        "envs/signing.py",
        "envs/lifted/folder.py",
        "envs/hub/lock.py",
        "envs/compile_caches/carrying.py",
    },
    ("envs", "huggingface_hub"): {"envs/hub/repository.py"},
    ("broker", "yaml"): {"broker/configuration"},
    ("broker", "zmq"): {"broker/io"},
    ("broker", "subprocess"): {"broker/processes"},
    ("broker", "sqlite3"): {"broker/storage"},
    ("client", "sqlite3"): {"client/history"},
    ("cluster", "ray"): {"cluster/ray_link.py"},
    # Bytes of other processes are parsed in ipc.
    ("broker", "struct"): set(),
    ("client", "struct"): {"client/arrays/recognition.py"},  # sizes of C's types
    ("workers", "struct"): set(),
}
# What decides does nothing else: no clock, no files, no sockets, nor does anything that it loads.
PURE = ("broker/core", "broker/selection")
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
    "importlib",  # of layerzero/__init__.py, which loads what users name
    "itertools",
    "json",
    "math",
    "operator",
    "pathlib",  # a path is a value, too
    "random",
    "re",
    "struct",
    "typing",
}
PURE_THIRD_PARTY = {"msgpack", "pydantic"}
# What turns bytes into code or objects into anything. No peer's bytes may come near it.
BANNED_MODULES = {"cloudpickle", "dill", "imp", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput"}
LOADS_CODE = {"import_module", "spec_from_file_location", "exec_module"}
MAY_LOAD_CODE = {
    "__init__.py",
    "client/cli/bisect.py",  # the user's own module, which the command line names
    "client/cli/bundle.py",  # likewise
    "envs/matrix/inside/lz_call.py",
    "envs/matrix/runner.py",
    "workers/boot.py",
    "workers/functions/code.py",
    "workers/functions/installed.py",
}

DRIVER_FUNCTION = re.compile(r"libcuda\.so.*|cu[A-Z][a-z]\w*")

FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))


@cache
def tree(file: str) -> ast.Module:
    """What is copied into foreign environments must parse on the oldest Python there."""
    oldest = (3, 10) if file.startswith(("ipc/", "workers/")) else (3, 11)
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"), file, feature_version=oldest)


@cache
def nodes(file: str) -> list[ast.AST]:
    return list(ast.walk(tree(file)))


@cache
def imported(file: str) -> set[str]:
    return {one.target for one in structure.imports(SOURCE / file)}


def lies_in(file: str, places: set[str]) -> bool:
    """Whether it is one of these files, or in one of these folders."""
    return file in places or any(file.startswith(f"{place}/") for place in places)


def each(files: list[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """One test of all these files: to hand out thousands of tests takes longer than to run them."""

    def of_one(test: Callable[[str], None]) -> Callable[[], None]:
        def of_all() -> None:
            assert files
            for file in files:
                try:
                    test(file)
                except AssertionError as failure:
                    failure.add_note(f"in {file}")
                    raise

        of_all.__name__, of_all.__doc__ = test.__name__, test.__doc__
        return of_all

    return of_one


@each([file for file in FILES if "/" in file])
def test_imports_stay_in_layer(file: str) -> None:
    """A file imports the stdlib, its own package, and what the tables grant."""
    package = file.partition("/")[0]
    ours, third_party = MAY_IMPORT[package]
    extra = {name for place, names in EXTRA.items() if lies_in(file, {place}) for name in names}
    for name in imported(file):
        top, _, rest = name.partition(".")
        layer = rest.partition(".")[0]
        if top == "layerzero":
            is_allowed = layer in ours | {package} | extra
        elif file.startswith(("workers/providers/", "envs/matrix/probes/")):
            is_allowed = top not in BANNED_MODULES
        else:
            is_allowed = top in sys.stdlib_module_names | third_party | extra
        assert is_allowed, f"{file}: {package} may not import {name}"
        only = ONLY_IN.get((package, top))
        assert only is None or lies_in(file, only), f"{file}: {top} belongs into {only}"


def test_folders_import_in_one_direction() -> None:
    """Who reads from the top down meets nothing that leads back up, not even for the type checker."""
    # Raises graphlib.CycleError, which names the circle.
    assert structure.floors(structure.edges())


def test_design_shows_the_structure_as_it_is() -> None:
    """A drawing that is made by hand lies after the next change."""
    assert structure.shown() == structure.drawing(), "out of date; run: python -m tests.structure"


@pytest.mark.parametrize("place", PURE)
def test_core_loads_nothing_that_does_io(place: str) -> None:
    """What it decides must depend on its events alone, or the simulator proves nothing; nor may what it imports
    bring in a clock, a file, a socket or a process."""
    start = [module for module in structure.modules() if structure.place(module) == place]
    assert start
    for module, others in structure.closure(start).items():
        assert {name.partition(".")[0] for name in others} <= PURE_STDLIB | PURE_THIRD_PARTY, module


def test_core_is_imported_alone() -> None:
    """As above, as the interpreter sees it: none of our modules that do I/O, none of the libraries that do."""
    code = (
        "import sys, pydantic.root_model, msgpack; from pydantic import BaseModel; before = set(sys.modules);"
        "import layerzero.broker.core.state;"
        "print(*sorted({name for name in set(sys.modules) - before}))"
    )
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    folders = {".".join(name.split(".")[1:3]) for name in loaded if name.startswith("layerzero.")}
    assert folders <= {
        "broker",
        "broker.core",
        "broker.selection",
        "ipc",
        "ipc.errors",
        "ipc.names",
        "ipc.records",
        "ipc.version",
        "ipc.wording",
    } | {
        name
        for name in folders
        if name.startswith(("capabilities", "ipc.cuda", "ipc.vocabulary", "ipc.shm", "ipc.transport"))
    }
    assert not loaded & {"ctypes", "mmap", "rich", "socket", "sqlite3", "ssl", "subprocess", "zmq"}


@each([file for file in FILES if file.startswith("workers/providers/")])
def test_provider_imports_its_library_when_it_is_loaded(file: str) -> None:
    """Listing the providers must not load any library."""
    parts = [
        n for n in tree(file).body if not isinstance(n, ast.FunctionDef | ast.ClassDef) and not is_type_checking(n)
    ]
    for name in (name for part in parts for node in ast.walk(part) for name in structure.names(node)):
        assert name.partition(".")[0] in sys.stdlib_module_names | {"layerzero"}, f"{file}: {name} at import time"


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@each(FILES)
def test_nothing_turns_bytes_into_code(file: str) -> None:
    """pickle over a socket, eval of a manifest, a shell around a name: each has been somebody's CVE."""
    for name in imported(file):
        assert name.partition(".")[0] not in BANNED_MODULES, f"{file}: {name}"
    for node in nodes(file):
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


CUDA_DRIVER = {f"ipc/cuda/{name}.py" for name in ("driver", "kernels", "graph_nodes", "abi", "library")}


@each([file for file in FILES if file not in CUDA_DRIVER])
def test_one_module_calls_the_cuda_driver(file: str) -> None:
    """The rest speaks of memory and order; a second caller would need all the care of the first."""
    for node in nodes(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not DRIVER_FUNCTION.fullmatch(node.value), f"{file}:{node.lineno}: {node.value}"


@each([file for file in FILES if file != "ipc/transport/plain.py"])
def test_one_module_reads_msgpack(file: str) -> None:
    """It bounds how deep a value is and what its keys are; a second reader would take what this one refuses."""
    assert not [node for node in nodes(file) if isinstance(node, ast.Attribute) and node.attr == "unpackb"]


@each(FILES)
def test_yaml_is_read_with_the_safe_loader_only(file: str) -> None:
    """The other loaders build any object that a file names; so do the functions that choose one by themselves."""
    if "yaml" not in imported(file):
        return
    used = {ast.unparse(node) for node in nodes(file) if isinstance(node, ast.Attribute)}
    of_yaml = {name for name in used if name.startswith("yaml.") and name.count(".") == 1}
    harmless = {"yaml.Node", "yaml.ScalarNode", "yaml.SequenceNode", "yaml.MappingNode"}
    assert of_yaml - harmless - {"yaml.YAMLError", "yaml.MarkedYAMLError"} == {"yaml.SafeLoader"}


def test_tables_name_places_that_exist() -> None:
    """An exception that outlives its file would hide the next one."""
    named = {*EXTRA, *PURE, *MAY_LOAD_CODE, *(place for places in ONLY_IN.values() for place in places)}
    assert not [place for place in sorted(named) if not (SOURCE / place).exists()]


def test_unit_tests_mirror_the_source() -> None:
    """The tests of a module lie where it does."""
    tests = structure.ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")}
    assert not [folder for folder in sorted(folders) if not (SOURCE / folder).is_dir()]


@each(FILES)
def test_no_module_is_long(file: str) -> None:
    """A reader keeps 500 lines in mind, not more."""
    assert len((SOURCE / file).read_text(encoding="utf-8").splitlines()) <= 500


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import os.path, zmq", {"os.path", "zmq"}),
        ("from layerzero.broker import core", {"layerzero.broker.core"}),
        (
            "from layerzero.broker.core import events as ev, actions",
            {"layerzero.broker.core.events", "layerzero.broker.core.actions"},
        ),
        ("def f():\n    from layerzero.broker.core.state import BrokerState", {"layerzero.broker.core.state"}),
    ],
)
def test_the_reader_sees_every_form_of_import(source: str, names: set[str]) -> None:
    """A test that overlooks a form would pass what it should refuse."""
    assert {name for node in ast.walk(ast.parse(source)) for name in structure.names(node)} == names
