"""Lifted calls: the kernels of a library that another process launches by the driver alone (docs/lifting.md)."""
