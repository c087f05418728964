"""Lifted calls: kernels of libraries that this process does not have, launched here (docs/lifting.md)."""
