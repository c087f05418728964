"""The rollouts that outlive their broker: one small file, written whole or not at all. One that does not hold, or that
others could have written, is left alone, and it is said why."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from layerzero.broker.selection.rollout import Rollout
from layerzero.ipc import files, kept_files
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.logs import log

FORMAT = 1
MAX_BYTES = 1 << 18
MAX_ROLLOUTS = 256


class RolloutFile:
    """Raises no error: `problem` says why nothing was read, or why what holds now is not kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""

    def read(self) -> tuple[Rollout, ...]:
        """What was kept; nothing where the file is not whole."""
        try:
            return self._read()
        except FileNotFoundError:
            return ()
        except OSError as exc:
            why = exc.strerror or str(exc)
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            why = f"{type(exc).__name__}: {exc}"
        except InvalidArgument as exc:
            why = exc.message
        self.problem = f"no rollout is in force: {self.path} is ignored: {why:.300}; remove it, or begin them anew"
        log("rollouts.refused", problem=self.problem)
        return ()

    def write(self, rollouts: Iterable[Rollout]) -> None:
        """In the place of what was there."""
        told = [rollout.to_wire() for rollout in rollouts]
        try:
            kept_files.write(self.path, json.dumps({"format": FORMAT, "rollouts": told}, indent=1).encode())
        except OSError as exc:
            self.problem = f"rollouts end with this broker: {self.path} cannot be written: {exc.strerror or exc}"
            log("rollouts.not_kept", problem=self.problem)
        else:
            self.problem = ""

    def _read(self) -> tuple[Rollout, ...]:
        value: Any = json.loads(files.read(self.path, MAX_BYTES, is_own=True))
        if not isinstance(value, dict) or value.get("format") != FORMAT or not isinstance(value.get("rollouts"), list):
            raise ValueError(f"it is not of format {FORMAT}")
        if len(value["rollouts"]) > MAX_ROLLOUTS:
            raise ValueError(f"it has {len(value['rollouts'])} rollouts; allowed: {MAX_ROLLOUTS}")
        found = {rollout.backend: rollout for rollout in map(Rollout.of, value["rollouts"])}
        if len(found) < len(value["rollouts"]):
            raise ValueError("it has two rollouts of one backend")
        return tuple(found.values())
