"""Which index has what an installer did not find."""

from __future__ import annotations

from collections.abc import Mapping

_PYTORCH = ("torch==", "torchvision==", "torchaudio==")
_PYTORCH_INDEX = "https://download.pytorch.org/whl"  # and the build: cpu, cu130


def hint(pins: Mapping[str, str], output: str) -> tuple[str, str]:
    """Builds such as torch 2.13.0+cpu are on their project's own index only, which a user has to configure: a line that
    says so of those that the installer's output names, and the variable to set, where it is known; else empty."""
    local = [f"{name}=={version}" for name, version in pins.items() if "+" in version and name in output]
    if not local:
        return "", ""
    which = f"{', '.join(local)} must come from an index or folder that has this build"
    if local[0].startswith(_PYTORCH):
        setting = f"PIP_EXTRA_INDEX_URL={_PYTORCH_INDEX}/{local[0].rpartition('+')[2]}"
        return f"{which}: {setting}, or a mirror of it\n", setting
    return f"{which}: name it in pip's configuration (extra-index-url or find-links) or in uv's\n", ""
