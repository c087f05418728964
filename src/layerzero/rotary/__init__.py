"""Tables of cosines and sines for lz.rope, of a base and a scaling as models' configurations say them.

    from layerzero import rotary

    cos, sin = rotary.tables(4096, 128, config["rope_parameters"])  # (4096, 64) each, float32, where workers reach them
    q, k = lz.rope_qk(q, k, cos[start:end], sin[start:end])

Needs NumPy: `pip install 'layerzero-broker[rotary]'`.
"""

from __future__ import annotations

from layerzero.rotary.frequencies import Frequencies, frequencies
from layerzero.rotary.tables import Tables, tables

__all__ = ["Frequencies", "Tables", "frequencies", "tables"]
