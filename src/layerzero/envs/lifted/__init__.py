"""Lifted calls that stand in for an environment: folders of them, signed, and those that were imported."""
