"""An interpreter for functions of tests and benches on a GPU: nothing is built or downloaded for it."""

from __future__ import annotations

import sys
import venv
from pathlib import Path


def interpreter(folder: Path) -> Path:
    """A venv that has what is installed here."""
    venv.create(folder, symlinks=True)
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / f"python{minor}" / "site-packages"
    here = [path for path in sys.path if path and Path(path).is_dir() and any(Path(path).glob("*.dist-info"))]
    (site / "here.pth").write_text("".join(f"{path}\n" for path in here))
    return folder / "bin" / "python"
