"""Backends that come from other packages, and which of them are allowed."""
