"""Lifted calls in the broker: which there are, proved and kept, and who may launch them (docs/lifting.md)."""
