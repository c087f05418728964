"""What a file of models says of itself: whether its layers ask for an attention function, which masks its models take,
and which formula is its own.

Layers and masks ask for it while torch.compile traces them, which warns of functools' caches.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

# What the ordinary formula, softmax(q k^T * scale + mask) v, is written with in files of models; tanh is that of a soft
# cap, which is an argument.
_NAMES = {
    "contiguous",
    "dtype",
    "dropout",
    "float32",
    "functional",
    "matmul",
    "nn",
    "softmax",
    "to",
    "torch",
    "transpose",
}
_NAMES |= {"F", "getattr", "hasattr", "head_dim", "num_key_value_groups", "repeat_kv", "shape", "size", "tanh"}
_NAMES |= {"training", "transpose", "type"}
# And what one with sinks is: a column more of each row of scores, which is cut off after the softmax.
_OF_SINKS = {"cat", "expand", "max", "reshape", "sinks", "values"}


@dataclass(frozen=True)
class ModelingFile:
    """A module with models. `eager`: its own attention formula, None where it has none. `arguments`: those that it
    names. `has_interface`: its layers look attention functions up by name. `takes_sdpa`: all of its models do, and with
    it bool masks; others add masks to numbers. `is_ordinary`: SDPA computes the same as `eager` for arguments that SDPA
    has. `has_sinks`: `eager` has sinks, of which SDPA knows nothing."""

    eager: Callable[..., Any] | None
    has_interface: bool
    takes_sdpa: bool
    is_ordinary: bool
    arguments: frozenset[str]
    has_sinks: bool = False


def modeling_file(name: str) -> ModelingFile:
    """The file of a module that is loaded, by the module's name."""
    found = _files.get(name)
    if found is None:
        found = _files[name] = _read(name)
    return found


_files: dict[str, ModelingFile] = {}


def _read(name: str) -> ModelingFile:
    module = sys.modules.get(name)
    eager = getattr(module, "eager_attention_forward", None)
    has_interface = hasattr(module, "ALL_ATTENTION_FUNCTIONS")
    models = [
        value
        for value in vars(module or object).values()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and value.__module__ == name
    ]
    takes_sdpa = has_interface and bool(models) and all(getattr(model, "_supports_sdpa", False) for model in models)
    names = set() if eager is None else set(_names(eager))
    has_sinks = "sinks" in names
    known = _NAMES | _OF_SINKS if has_sinks else _NAMES
    is_ordinary = takes_sdpa or (eager is not None and names <= known)
    arguments = frozenset(inspect.signature(eager).parameters if eager is not None else ())
    return ModelingFile(eager, has_interface, takes_sdpa, is_ordinary, arguments, has_sinks)


def file_of(layer: object) -> ModelingFile:
    """The file that a layer's class, or the class it comes from, is written in: the first with a formula."""
    found = _of_class.get(type(layer))
    if found is None:
        found = _of_class[type(layer)] = _file_of(type(layer))
    return found


_of_class: dict[type, ModelingFile] = {}


def _file_of(layer: type) -> ModelingFile:
    found = [modeling_file(cls.__module__) for cls in layer.__mro__ if cls.__module__.startswith("transformers")]
    for file in found:
        if file.eager is not None:
            return file
    return found[0] if found else modeling_file(layer.__module__)


def takes_bool_masks(config: object) -> bool:
    """Whether the models of a configuration do. They are in the files that lie beside it."""
    return _takes_bool_masks(type(config).__module__.rpartition(".")[0])


def _takes_bool_masks(package: str) -> bool:
    return _do_all_take(package, len(sys.modules))


@functools.lru_cache(256)
def _do_all_take(package: str, modules: int) -> bool:
    """`modules`: how many are loaded. It is asked for each token, and to look through all takes half a millisecond."""
    names = [name for name in tuple(sys.modules) if name.startswith(f"{package}.modeling_")]
    return bool(names) and all(modeling_file(name).takes_sdpa for name in names)


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return code.co_names if code is not None else ("unknown",)


torch.compiler.assume_constant_result(_takes_bool_masks)
