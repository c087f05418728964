"""What Diffusers' dispatcher is told of us: a further name of attention backends. Its names are a closed enumeration,
so a member is added to that."""

from __future__ import annotations

from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.utils.constants import DIFFUSERS_ATTN_BACKEND

from layerzero.diffusers.attention import dispatched

NAME = "layerzero"
_MEMBER = "LAYERZERO"


class _Everything(set[str]):
    """Names of arguments, for the dispatcher: it drops in silence what a backend does not name. Ours gets all; what it
    does name are the elements, for DIFFUSERS_ATTN_CHECKS."""

    def __contains__(self, name: object) -> bool:
        return True


def _made() -> Any:
    member = str.__new__(AttentionBackendName, NAME)
    member._name_, member._value_ = _MEMBER, NAME
    member.__objclass__ = AttentionBackendName
    return member


_member = _made()


def register() -> None:
    """Make "layerzero" known to `model.set_attention_backend` and to `diffusers.attention_backend`. The import of
    layerzero.diffusers does it; twice is once."""
    names, registry = AttentionBackendName, _AttentionBackendRegistry
    if _MEMBER not in names._member_map_:
        type.__setattr__(names, _MEMBER, _member)
        names._member_names_.append(_MEMBER)
        names._member_map_[_MEMBER] = _member
        names._value2member_map_[NAME] = _member
    registry.register(_member)(dispatched)
    registry._supported_arg_names[_member] = _Everything(registry._supported_arg_names[_member])


def unregister() -> None:
    """Undo it: the name is unknown, and the process's default backend is Diffusers' again where it was ours. Models
    that have ours go on with the native backend."""
    names, registry = AttentionBackendName, _AttentionBackendRegistry
    if _MEMBER not in names._member_map_:
        return
    type.__delattr__(names, _MEMBER)
    names._member_names_.remove(_MEMBER)
    del names._member_map_[_MEMBER], names._value2member_map_[NAME]
    if registry._active_backend is _member:
        registry.set_active_backend(AttentionBackendName(DIFFUSERS_ATTN_BACKEND))
    native = AttentionBackendName.NATIVE  # processors keep the member that they were given
    for table in (registry._backends, registry._constraints, registry._supported_arg_names):
        table[_member] = table[native]
