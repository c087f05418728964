"""Decides which kernel serves a call and supervises the workers. Never sees tensor bytes, imports no kernel library."""
