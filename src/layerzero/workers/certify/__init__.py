"""Calls with known answers, by which a probe certifies kernels."""
