"""The choices of execution plans (docs/plans.md) that outlive their process: which backend the calls of a plan prefer
together, and the times of whole runs that led to it.

One file for each plan and policy, in a folder beside the measured times. A file that does not hold, that belongs to
another user, or whose backends are not what they were is ignored, and it is said why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from layerzero.ipc import files, kept_files
from layerzero.ipc.errors import ProtocolError
from layerzero.ipc.logs import log
from layerzero.ipc.transport.plain import pack_body, unpack_body

MAX_ENTRIES = 1024
MAX_BYTES = 1 << 14  # of one
MAX_CANDIDATES = 64
MAX_TEXT = 300
MAX_AGE_S = 30 * 86400.0  # what else a machine did in that minute may have misled a choice: not for ever
_FORMAT = 1


@dataclass(frozen=True)
class PlanChoice:
    """`us`: of each candidate the median of its runs in us, 0.0 for one that was not timed; `chosen` is one of them, ""
    for each call's own best. `identities`: of each backend among them, the hash of what its times depend on. `what`:
    function and arguments, for people. `made_s`: seconds since 1970."""

    chosen: str
    us: Mapping[str, float]
    identities: Mapping[str, str]
    what: str
    made_s: float

    def check(self) -> None:
        """Raises ValueError for what nobody can have chosen."""
        texts = (self.chosen, self.what, *self.us, *self.identities, *self.identities.values())
        if not all(type(text) is str and len(text) <= MAX_TEXT for text in texts):
            raise ValueError(f"what should be text of at most {MAX_TEXT} characters is not")
        times = (self.made_s, *self.us.values())
        if not all(type(one) is float and 0.0 <= one < math.inf for one in times):
            raise ValueError("what should be a time is not")
        if self.chosen not in self.us or "" not in self.us or not 2 <= len(self.us) <= MAX_CANDIDATES:
            raise ValueError("the one chosen is no candidate, or there was nothing to choose")
        if set(self.identities) != set(self.us) - {""}:
            raise ValueError("the identities are not those of the candidates")


class PlanChoices:
    """Raises no error: where nothing can be written nothing is kept, and `problem` says why."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problem = ""

    def find(self, key: str, identities: Mapping[str, str]) -> tuple[PlanChoice | None, str]:
        """The choice of this key, if it holds for backends of these identities, or why one that is there is ignored."""
        path = self.folder / key
        found, why = self._read(path)
        if found is None:
            return None, why
        changed = [name for name, identity in found.identities.items() if identities.get(name) != identity]
        if changed:
            return None, f"the environment, device or version of {', '.join(changed)} is another one now"
        if abs(time.time() - found.made_s) > MAX_AGE_S:
            return None, f"it is older than {MAX_AGE_S / 86400:g} days"
        kept_files.touch(path)
        return found, ""

    def add(self, key: str, choice: PlanChoice) -> str:
        """Keep it. Returns why it is not kept, "" where it is."""
        value = {
            "format": _FORMAT,
            "chosen": choice.chosen,
            "us": dict(choice.us),
            "identities": dict(choice.identities),
            "what": choice.what,
            "made_s": choice.made_s,
        }
        try:
            choice.check()
            kept_files.write(self.folder / key, kept_files.seal(pack_body(value)))
            self.problem = ""
        except (OSError, ValueError) as exc:
            self.problem = f"choices of plans are not kept: {exc}"
            return str(exc)
        kept_files.remove_drafts(self.folder)
        for path in kept_files.by_age(self.folder)[:-MAX_ENTRIES]:
            kept_files.remove(path)
        return ""

    def entries(self) -> Iterator[tuple[str, PlanChoice | None, str]]:
        """All that are there, the last used last: key, choice, and why it is ignored."""
        for path in kept_files.by_age(self.folder):
            yield path.name, *self._read(path)

    def clear(self) -> int:
        """Remove all. Returns how many there were."""
        return kept_files.remove_all(self.folder)

    @staticmethod
    def _read(path: Path) -> tuple[PlanChoice | None, str]:
        try:
            value = unpack_body(kept_files.unseal(files.read(path, MAX_BYTES, is_own=True)))
            if value["format"] != _FORMAT:
                return None, "another version wrote it"
            made = (value[name] for name in ("chosen", "us", "identities", "what", "made_s"))
            found = PlanChoice(*made)
            found.check()
            return found, ""
        except FileNotFoundError:
            return None, ""
        except OSError as exc:
            why = exc.strerror or str(exc)
        except (kept_files.NotWhole, ProtocolError, KeyError, TypeError, ValueError, AttributeError) as exc:
            why = str(exc)
        log("plan_choice.ignored", file=str(path), why=why)
        return None, why
