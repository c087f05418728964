"""Calls of ours from a layer of a model of Diffusers: layerzero.torch.running with a report of their own."""

from __future__ import annotations

from layerzero.torch.running import Runner

runner = Runner("Diffusers")
