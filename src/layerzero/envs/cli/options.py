"""The options that several commands of `lz env` have."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import platformdirs
import typer


class Variant(str, Enum):
    CPU = "cpu"
    CU12 = "cu12"
    CU13 = "cu13"


class InstallerChoice(str, Enum):
    UV = "uv"
    PIP = "pip"


Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Environments; all of them if left out.")]
StoreDir = Annotated[
    Path,
    typer.Option("--store", envvar="LAYERZERO_STORE", help="Where environments are kept.", file_okay=False),
]
Folders = Annotated[
    list[Path] | None,
    typer.Option(
        "--manifests",
        envvar="LAYERZERO_MANIFEST_DIRS",
        exists=True,
        file_okay=False,
        help="A further folder of manifests; may be repeated.",
    ),
]
VariantChoice = Annotated[
    Variant,
    typer.Option(
        "--variant",
        envvar="LAYERZERO_VARIANT",
        help="Which build of the environment; those without builds for accelerators are used as they are.",
    ),
]
ProfileName = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="NAME",
        envvar="LAYERZERO_PROFILE",
        help="Of which calls: inference, quantized, nlp, all, or one of lz profile learn.",
    ),
]
Base = Annotated[
    Path | None,
    typer.Option(
        "--overlay",
        metavar="PYTHON",
        envvar="LAYERZERO_OVERLAY",
        help="An interpreter to build over: what it has is used, the rest comes from the wheelhouse.",
    ),
]
WheelhouseDir = Annotated[
    Path | None,
    typer.Option(
        "--wheelhouse",
        metavar="DIR",
        envvar="LAYERZERO_WHEELHOUSE",
        help="A folder of wheels that is the only source; no network is used.",
    ),
]
HubFolder = Annotated[
    Path | None,
    typer.Option(
        "--hub-folder",
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="A copy of the kernel repository that takes the place of the hub; for one environment.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that a probe may be in one case.")]

STORE = platformdirs.user_cache_path("layerzero")
Minor = Annotated[
    str | None,
    typer.Option("--python", metavar="3.X", help="Of the manifest's Pythons (python, other_pythons) this one."),
]
