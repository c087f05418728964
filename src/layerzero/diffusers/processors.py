"""Processors that call torch's SDPA themselves and do not ask the dispatcher: those of UNets, VAEs, Stable Diffusion 3
and others. Each keeps its own code; what it asks SDPA for is served by LayerZero."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import layerzero as lz
from layerzero.diffusers.attention import sdpa

Model = TypeVar("Model", bound=nn.Module)
Class = Any  # a class of processors


class _Served:
    """What classes of ours have besides. `replaced`: the class of Diffusers that a class is made from."""

    replaced: Class


class _Sdpa(TorchFunctionMode):
    """Within it torch's SDPA is ours."""

    def __init__(self, layer: object) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return sdpa(self.layer, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@functools.cache
def processor(cls: Class) -> Class:
    """A subclass of one of Diffusers' classes of processors whose calls of SDPA are served by LayerZero, for
    `model.set_attn_processor` and `Attention.set_processor`:

        model.set_attn_processor(layerzero.diffusers.processor(AttnProcessor2_0)())

    It takes what the class takes, and returns what it returns. Raises lz.InvalidArgument for a class that does not call
    SDPA."""
    if not calls_sdpa(cls):
        raise lz.InvalidArgument(
            f"name a class of processors that calls SDPA: {getattr(cls, '__name__', cls)} does not"
        )
    inner = cls.__call__

    @functools.wraps(inner)  # Attention reads from the signature which arguments there are
    def call(self: Any, attn: nn.Module, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        with _Sdpa(attn):
            found: Tensor | tuple[Tensor, ...] = inner(self, attn, *args, **kwargs)
            return found

    made = type(f"LayerZero{cls.__name__}", (cls, _Served), {"__call__": call, "replaced": cls})
    made.__doc__ = f"{cls.__name__} of Diffusers, its attention served by LayerZero."
    return made


def calls_sdpa(cls: Class) -> bool:
    """Whether processors of a class call torch's SDPA in their own code, and are none of ours."""
    call = getattr(cls, "__call__", None)  # noqa: B004  # its code is wanted
    code = getattr(call, "__code__", None)
    return code is not None and "scaled_dot_product_attention" in code.co_names and not issubclass(cls, _Served)


def set_processors(model: Model) -> Model:
    """The model, its processors that call SDPA themselves made ours; others are left alone: those that ask Diffusers'
    dispatcher take `model.set_attention_backend("layerzero")`. `unset_processors` undoes it.

    Each processor stays the object that it is, with its weights, where it has some, under the same names."""
    for one in _processors(model):
        cls: Class = type(one)
        if calls_sdpa(cls):
            one.__class__ = processor(cls)
    return model


def unset_processors(model: Model) -> Model:
    """The model, with the processors that it had."""
    for one in _processors(model):
        if isinstance(one, _Served):
            one.__class__ = one.replaced
    return model


def _processors(model: nn.Module) -> list[Any]:
    found = (getattr(module, "processor", None) for module in model.modules())
    return [one for one in found if one is not None]
