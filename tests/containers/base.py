"""A base image without a registry: this machine's Python, a shell, a few tools and the libraries that they load.

`python -m tests.containers.base | docker import - NAME`. As small as a slim image, and with no more in it, so that a
wheel that lacks a library lacks it here, too.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

TOOLS = ("cat", "chmod", "chown", "cp", "env", "ln", "ls", "mkdir", "mv", "rm", "sh", "sleep")
# What slim images have besides: wheels of C++ libraries take them from the system.
LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1")
_UNUSED = re.compile(
    r"(site-packages|test|idlelib|tkinter|turtledemo|lib2to3|config-[^/]*|.*\.a|lib-dynload/_t(kinter|est).*)(/|$)"
)


def write(out: io.BufferedIOBase) -> None:
    """The image's file system as a tar, all of it root's."""
    prefix = Path(sys.base_prefix)
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    stdlib = prefix / "lib" / minor
    if not (stdlib / "ensurepip" / "_bundled").is_dir():
        raise SystemExit(f"{prefix} has no ensurepip, which the images' builds need; use a complete Python {minor[6:]}")
    python = prefix / "bin" / minor
    files = {python, *prefix.glob("lib/libpython*.so*")}
    files |= {path for path in _tree(stdlib) if not _UNUSED.match(str(path.relative_to(stdlib)))}
    tools = {Path(found) for name in TOOLS if (found := shutil.which(name, path="/usr/bin:/bin"))}
    binaries = {*tools, *(path for path in files if path == python or ".so" in path.suffixes)}
    files |= tools | set(_libraries(binaries)) | set(_cached())
    members = _with_targets(files)
    folders = {str(parent)[1:]: 0o755 for path in members for parent in path.parents[:-1]}
    folders |= {"tmp": 0o1777, "run": 0o755, "opt": 0o755, "usr/local/bin": 0o755}
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        for name, mode in sorted(folders.items()):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            tar.addfile(folder)
        for path in sorted(members):
            tar.add(path, recursive=False, filter=_roots)
        for name in ("python3", minor):
            link = tarfile.TarInfo(f"usr/local/bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, str(python)
            tar.addfile(link)
        text = b"root:x:0:0:root:/root:/bin/sh\n"
        users = tarfile.TarInfo("etc/passwd")
        users.size, users.mode = len(text), 0o644
        tar.addfile(users, io.BytesIO(text))


def _roots(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode |= 0o444 | (entry.mode & 0o100 and 0o111)
    return entry


def _tree(folder: Path) -> Iterator[Path]:
    for base, _, names in os.walk(folder):
        yield from (Path(base, name) for name in names)


def _libraries(binaries: Iterable[Path]) -> Iterator[Path]:
    """What the loader finds for them, as `ldd` prints it: `name => path (address)`, or a path alone."""
    answer = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False)
    yield from map(Path, set(re.findall(r"(/\S+) \(0x", answer.stdout)))


def _cached() -> Iterator[Path]:
    """Libraries by name, and the loader's cache that knows where they are."""
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for name in LIBRARIES:
        found = re.search(rf"^\s*{re.escape(name)} .*x86-64.*=> (\S+)$", cache, re.MULTILINE)
        if found is None:
            raise SystemExit(f"this machine has no {name}, which the images need")
        yield Path(found[1])
    yield Path("/etc/ld.so.cache")


def _with_targets(paths: Iterable[Path]) -> set[Path]:
    """The paths without links among their folders, and for each that is a link, what it leads to. The links at the
    root of a merged /usr are kept."""
    found: set[Path] = {Path(top) for top in ("/bin", "/lib", "/lib64", "/sbin") if Path(top).is_symlink()}
    for path in paths:
        here = path.parent.resolve() / path.name
        while here not in found:
            found.add(here)
            if here.is_symlink():
                target = here.parent / os.readlink(here)
                here = target.parent.resolve() / target.name
    return found


if __name__ == "__main__":
    write(sys.stdout.buffer)
