"""Variables that are set and have no effect: misspelt ones, and those that name what the running broker does not
follow. Each is a SettingWarning; `lz` shows it as a note."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from layerzero.client.session.session import Session
from layerzero.ipc.errors import InvalidArgument
from layerzero.ipc.vocabulary import variables
from layerzero.ipc.vocabulary.variables import SettingWarning

POLICY, MANIFEST_DIRS, PROFILE = "LAYERZERO_POLICY", "LAYERZERO_MANIFEST_DIRS", "LAYERZERO_PROFILE"


def warn_of_variables() -> None:
    """Of those in this process's environment that nothing reads."""
    for text in variables.mistakes(os.environ):
        warnings.warn(text, SettingWarning, stacklevel=3)


def warn_of_broker(session: Session) -> None:
    """Of those that a broker reads when it starts, where the one that runs has read something else. Asks it only when
    one of them is set."""
    if not any(os.environ.get(name) for name in (POLICY, MANIFEST_DIRS, PROFILE)):
        return
    try:
        followed = session.ask("settings")
    except InvalidArgument:
        return  # a broker from before there was this request
    for text in _differences(os.environ, followed):
        warnings.warn(text, SettingWarning, stacklevel=3)


def _differences(environ: Mapping[str, str], followed: Mapping[str, Any]) -> Iterator[str]:
    """`followed`: the broker's answer to `settings`."""
    pid, policy = followed["pid"], environ.get(POLICY)
    if policy and _resolved(policy) != _resolved(followed["policy"]):
        yield f"the broker (pid {pid}) uses {followed['policy']}; {POLICY} here names {_resolved(policy)}; run: lz down"
    profile, its = environ.get(PROFILE), followed.get("profile", "all")
    if profile and profile != its:
        yield f"the broker (pid {pid}) serves the profile {its}; {PROFILE} here names {profile}; run: lz down"
    asked = [_resolved(folder) for folder in environ.get(MANIFEST_DIRS, "").split(os.pathsep) if folder]
    missing = [folder for folder in asked if folder not in {_resolved(one) for one in followed["manifest_dirs"]}]
    if missing:
        yield (
            f"the broker (pid {pid}) knows no backend of {', '.join(map(str, missing))}, which {MANIFEST_DIRS} here "
            "names; run: lz down"
        )


def _resolved(path: str) -> Path:
    return Path(path).resolve()
