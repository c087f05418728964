"""Inputs that killed workers: which ones are refused, and for how long."""

from __future__ import annotations

from layerzero.ipc.errors import DigestRequired, LayerZeroError, Poison

MAX_DEATHS_PER_CALL = 2
MAX_DIGESTS = 256  # per signature; the oldest is let go


class Quarantine:
    """Digests of poisonous inputs, by call signature. A signature with none in quarantine costs its calls nothing;
    one that has asks its callers for a digest, so that harmless inputs of the same shape still pass."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._until_s: dict[bytes, dict[bytes, float]] = {}

    def add(self, signature: bytes, digest: bytes, now_s: float) -> None:
        known = self._until_s.setdefault(signature, {})
        known[digest] = now_s + self._duration_s
        if len(known) > MAX_DIGESTS:
            del known[next(iter(known))]

    def is_empty(self, now_s: float) -> bool:
        """Nothing is refused any more."""
        for signature, known in list(self._until_s.items()):
            if all(until_s <= now_s for until_s in known.values()):
                del self._until_s[signature]
        return not self._until_s

    def asks_for_digests(self, signature: bytes) -> bool:
        """Whether calls of this signature must be looked at one by one."""
        return signature in self._until_s

    def refusal(self, signature: bytes, digest: bytes, now_s: float) -> LayerZeroError | None:
        """Why a call may not run, or None. `digest` is empty when the caller gave none."""
        known = self._until_s.get(signature)
        if known is None:
            return None
        for old in [d for d, until_s in known.items() if until_s <= now_s]:
            del known[old]
        if not known:
            del self._until_s[signature]
            return None
        if not digest:
            return DigestRequired("calls of this signature need a digest of their inputs")
        if digest not in known:
            return None
        left_s = known[digest] - now_s
        text = f"these inputs killed {MAX_DEATHS_PER_CALL} workers; refused for another {left_s:.0f} s"
        return Poison(text, quarantine_s=round(left_s, 1))

    def verdict(self, deaths: int) -> Poison:
        """The end of a call that has just become poisonous."""
        text = f"this call killed {deaths} workers; its inputs are refused from now on"
        return Poison(text, quarantine_s=self._duration_s)
