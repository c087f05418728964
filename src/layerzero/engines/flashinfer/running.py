"""Calls of ours in the place of flashinfer's: layerzero.torch.running with a report of their own."""

from __future__ import annotations

from layerzero.torch.running import Runner

runner = Runner("flashinfer")
