"""The policy's key `kernel_sources`: which backends from outside may be used. Read before the rest of the policy, whose
names can be checked only when all backends are known."""

from __future__ import annotations

from collections.abc import Mapping

from layerzero.broker.configuration.policy_source import load_layer
from layerzero.broker.configuration.settings import Settings
from layerzero.broker.selection.policy import Layer, Policy
from layerzero.envs.trust.allowed import Allowed
from layerzero.ipc.vocabulary.policy import KERNEL_SOURCES


def allowed(settings: Settings) -> Mapping[str, Allowed]:
    """By name, as files and environment are now. Raises ConfigError when the policy is wrong."""
    file, is_optional = settings.policy_file()
    record = settings.source_record()
    files = [path for path, may_lack in ((record, True), (file, is_optional)) if path.exists() or not may_lack]
    layers = [load_layer(path) for path in files]
    layers += [Layer(one["origin"], one["values"]) for one in settings.policy_variables()]
    policy = Policy.of(*layers)
    origins = policy.origins
    return {n: Allowed(value, origins[f"{KERNEL_SOURCES}.{n}"]) for n, value in policy.kernel_sources.items()}
