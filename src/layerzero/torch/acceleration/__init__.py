"""Calls of torch's own functions served by LayerZero: what is taken over, where, and what came of it."""
