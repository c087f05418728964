"""Calls whose tensors lie on a GPU."""
