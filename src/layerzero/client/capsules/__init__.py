"""Calls whose worker died or hung, kept so that they can be made again (docs/capsules.md)."""
