"""Putting our layers into a model: by HF kernels' `kernelize`, for which there are repositories, or by ours, which
needs no other package."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any, TypeVar

from torch import nn

import layerzero as lz
from layerzero.transformers.layers import LAYERS, RotaryPosEmb

Model = TypeVar("Model", bound=nn.Module)

Class = Any  # a class of layers
ROTARY = "rotary_pos_emb"
_APPLY = "apply_rotary_pos_emb"
_MARK = re.compile(r"^@use_kernel_forward_from_hub\(\"(\w+)\"\)$", re.MULTILINE)
_MARKED_ROTARY = re.compile(rf"^@use_kernelized_func\({_APPLY}\)$", re.MULTILINE)


class Repository:
    """A layer of ours, as HF kernels wants it:
    `register_kernel_mapping({"RMSNorm": {"cpu": Repository("RMSNorm")}})`."""

    def __init__(self, layer_name: str) -> None:
        if layer_name not in LAYERS:
            raise lz.InvalidArgument(f"name one of {', '.join(LAYERS)}: there is no layer {layer_name}")
        self.layer_name = layer_name

    def load(self) -> type[nn.Module]:
        """The class whose forward function replaces a layer's."""
        return LAYERS[self.layer_name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Repository) and other.layer_name == self.layer_name

    def __hash__(self) -> int:
        return hash((Repository, self.layer_name))

    def __repr__(self) -> str:
        return f"layerzero.transformers.Repository({self.layer_name!r})"


def kernel_mapping() -> dict[str, dict[str, Repository]]:
    """All our layers, on the CPU and on CUDA, for `kernels.register_kernel_mapping` and `use_kernel_mapping`."""
    return {name: dict.fromkeys(("cpu", "cuda"), Repository(name)) for name in LAYERS}


def kernelize(model: Model, layers: Iterable[str] | None = None) -> Model:
    """The model, its layers that Transformers marks as replaceable replaced by ours: RMSNorm, activations and
    rotary_pos_emb, or the marks named. With gradients. `unkernelize` undoes it.

    For where HF kernels' `kernelize` cannot be had: it needs the version that Transformers asks for."""
    wanted = frozenset(LAYERS if layers is None else layers)
    if unknown := wanted - LAYERS.keys():
        raise lz.InvalidArgument(f"name some of {', '.join(LAYERS)}: there is no layer {sorted(unknown)[0]}")
    for module in model.modules():
        cls: Class = type(module)
        mark = mark_of(cls)
        if mark in wanted:
            module.forward = MethodType(LAYERS[mark].forward, module)
        elif ROTARY in wanted and has_rotary(cls):
            module.forward = MethodType(_with_rotary(cls), module)
    return model


def unkernelize(model: Model) -> Model:
    """The model, with the layers that it had."""
    for module in model.modules():
        cls: Class = type(module)
        if mark_of(cls) in LAYERS or has_rotary(cls):
            vars(module).pop("forward", None)
    return model


@functools.cache
def mark_of(cls: Class) -> str:
    """By what name Transformers marks a class as replaceable, "" where it does not. Read from its source: without HF
    kernels the mark leaves no trace in the class."""
    found = _MARK.search(_decorators(cls))
    return found[1] if found else ""


@functools.cache
def has_rotary(cls: Class) -> bool:
    """Whether a class is marked as one whose rotary embedding may be replaced, and rotates halves as ours does."""
    if not _MARKED_ROTARY.search(_decorators(cls)):
        return False
    forward = cls.forward
    if not isinstance(forward, FunctionType) or _APPLY not in forward.__code__.co_names:
        return False
    names = vars(sys.modules[cls.__module__])
    half = names.get("rotate_half") or names.get("_apply_rotary_emb")
    return half is not None and _source(half) in _halves()


@functools.cache
def _with_rotary(cls: Class) -> FunctionType:
    """The class's forward function, which finds ours by the name of its rotary embedding. The file's other classes
    keep theirs."""
    forward: Any = cls.forward
    rotary = RotaryPosEmb()
    names = {**forward.__globals__, _APPLY: rotary.forward}
    del names["__name__"]  # by which torch.compile would look the names up in the file
    changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__, changed.__module__ = forward.__kwdefaults__, forward.__module__
    return changed


@functools.cache
def _halves() -> frozenset[str]:
    """Sources of functions that rotate the halves of a head."""
    from transformers.models.gpt_oss.modeling_gpt_oss import _apply_rotary_emb
    from transformers.models.llama.modeling_llama import rotate_half

    return frozenset((_source(rotate_half), _source(_apply_rotary_emb)))


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _decorators(cls: Class) -> str:
    return _source(cls).partition("\nclass ")[0] if cls.__module__.startswith("transformers") else ""
