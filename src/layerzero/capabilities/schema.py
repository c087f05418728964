"""The JSON Schema of a descriptor, made from the model. `python -m layerzero.capabilities.schema` writes it anew."""

from __future__ import annotations

import json
from pathlib import Path

from layerzero.capabilities.descriptor import SCHEMA_VERSION, Capability

PATH = Path(__file__).resolve().with_name("descriptor.schema.json")


def schema_text() -> str:
    """For editors and other tools. Rules that tie fields together are the loader's alone (docs/capabilities.md)."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"LayerZero capability descriptor {SCHEMA_VERSION}",
    }
    return json.dumps({**Capability.model_json_schema(), **head}, indent=2) + "\n"


if __name__ == "__main__":
    PATH.write_text(schema_text(), encoding="utf-8")
