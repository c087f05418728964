"""What a build has to download: asked of uv, which knows what its cache has; sizes of the index, or of its server."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import tomllib
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from layerzero.envs.build.base import Base, inspect
from layerzero.envs.build.environ import tool_environ
from layerzero.envs.build.installers import Installer, Uv, without_passwords
from layerzero.envs.build.interpreters import Python
from layerzero.envs.build.lock import Lock
from layerzero.envs.build.resolution import Resolution

_UNCACHED = re.compile(r"Identified uncached distribution: ([A-Za-z0-9._-]+)==")
_WOULD = re.compile(r"Would download (\d+) package")
_HEAD_TIMEOUT_S, _HEADS = 5.0, 8


@dataclass(frozen=True)
class Downloads:
    """`sizes`: what is to be downloaded, distribution -> bytes, None where nobody says. `problem`: why what is cached
    is not known; then `sizes` has all."""

    wheels: int
    sizes: Mapping[str, int | None]
    problem: str = ""

    @property
    def nbytes(self) -> int:
        """Of those whose size is known."""
        return sum(size or 0 for size in self.sizes.values())

    @property
    def unsized(self) -> int:
        return sum(size is None for size in self.sizes.values())

    def __str__(self) -> str:
        if self.problem:
            return f"{self.wheels} wheels; {self.problem}"
        if not self.sizes:
            return f"{self.wheels} wheels, all of them here; nothing to download"
        unsized = f", and {self.unsized} of unknown size" if self.unsized else ""
        cached = self.wheels - len(self.sizes)
        return (
            f"{self.wheels} wheels: {cached} cached, {len(self.sizes)} to download, {megabytes(self.nbytes)}{unsized}"
        )


def of_lock(lock: Lock, python: Python, installer: Installer) -> Downloads:
    """What installing `lock` downloads. Asks the indexes for metadata, at most."""
    everything: dict[str, int | None] = dict.fromkeys(lock.pins)
    if not isinstance(installer, Uv):
        problem = "pip does not tell what its cache has (uv does: python -m pip install uv)"
        return Downloads(len(lock.pins), everything, problem)
    try:
        names = _uncached(lock, python, installer)
        return Downloads(len(lock.pins), _sizes(names, lock, python, installer) if names else {})
    except _Unknown as exc:
        return Downloads(len(lock.pins), everything, f"what is to be downloaded is not known: {exc}")


def of_wheels(wheels: Resolution) -> Downloads:
    return Downloads(len(wheels.wheels), {})


def metered(downloads: Downloads, say: Callable[[str], None]) -> Callable[[str], None]:
    """A listener to uv's lines that tells how much is there, wherever uv says that something is."""
    fetched: dict[str, int] = {}

    def listen(line: str) -> None:
        found = re.match(r"\s*(?:Downloaded|Prepared) (\S+)", line)
        name = canonicalize_name(found[1]) if found else ""
        if downloads.sizes.get(name):
            fetched[name] = downloads.sizes[name] or 0
            say(f"downloaded {megabytes(sum(fetched.values()))} of {megabytes(downloads.nbytes)} ({name})")
        else:
            say(line)

    return listen


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


class _Unknown(Exception):
    """uv did not answer as it does."""


def _uncached(lock: Lock, python: Python, tool: Uv) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="lz-plan-") as empty:
        flags = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-python-downloads", "--no-progress")
        target = ("--target", empty, "--python", python.path, "-r", lock.path)
        said = _ask(tool, "install", "--dry-run", "--verbose", *flags, *tool.flags, *target).stderr
    count = _WOULD.search(said)
    names: list[str] = sorted({canonicalize_name(name) for name in _UNCACHED.findall(said)})
    if len(names) != (int(count[1]) if count else 0):
        raise _Unknown(f"uv would download {count[1] if count else 0} wheels, and names {len(names)}")
    return names


def _sizes(names: Iterable[str], lock: Lock, python: Python, tool: Uv) -> dict[str, int | None]:
    """Of the wheels that `python` would get."""
    flags = ("--format", "pylock.toml", "--no-deps", "--only-binary", ":all:", "--no-python-downloads", "--no-header")
    said = _ask(tool, "compile", lock.path, *flags, *tool.flags, "--python", python.path, "--quiet").stdout
    try:
        packages = tomllib.loads(said).get("packages", [])
        base = inspect(python.path)
        listed: dict[str, dict[str, Any]] = {
            canonicalize_name(one["name"]): _wheel(one.get("wheels", []), base) for one in packages
        }
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as exc:
        raise _Unknown(f"uv's pylock.toml is not understood ({exc})") from exc
    chosen = {name: listed.get(name, {}) for name in names}
    with ThreadPoolExecutor(max_workers=_HEADS) as pool:
        return dict(zip(chosen, pool.map(lambda wheel: _size(wheel, tool.environ), chosen.values()), strict=True))


def _wheel(wheels: list[dict[str, Any]], base: Base) -> dict[str, Any]:
    """The one that fits best."""
    ranked = []
    for wheel in wheels:
        file = unquote(str(wheel.get("name") or wheel.get("url") or wheel.get("path")).rpartition("/")[2])
        try:
            ranks = [base.tags[tag] for tag in parse_wheel_filename(file)[3] if tag in base.tags]
        except InvalidWheelFilename:
            continue
        if ranks:
            ranked.append((min(ranks), wheel))
    return min(ranked, key=lambda pair: pair[0])[1] if ranked else {}


def _size(wheel: Mapping[str, Any], environ: Mapping[str, str]) -> int | None:
    """What the index says; else of the local file, or what the server of the file says."""
    import ssl  # these here: this module is loaded by every broker, and takes five times as long with them
    import urllib.request

    if isinstance(wheel.get("size"), int):
        return int(wheel["size"])
    url = str(wheel.get("url", ""))
    path = wheel.get("path") or (unquote(urlsplit(url).path) if url.startswith("file:") else None)
    try:
        if path:
            return Path(path).stat().st_size
        if not url.startswith(("https://", "http://")):
            return None
        certificates = environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_FILE")
        context = ssl.create_default_context(cafile=certificates)
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=_HEAD_TIMEOUT_S, context=context) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, ValueError, TypeError):  # no such file, no network, a server that does not say
        return None


def _ask(tool: Uv, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    # One try: the install after this has more patience.
    ran = subprocess.run(
        [tool.binary, "pip", *argv],
        env=tool_environ(os.environ, {"UV_HTTP_RETRIES": "0", **tool.environ}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if ran.returncode != 0:
        words = [line for line in ran.stderr.splitlines() if not line.startswith(("DEBUG", "TRACE"))]
        raise _Unknown(without_passwords("\n".join(words[-3:])))
    return ran
