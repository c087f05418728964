"""Which kernel serves a call, and why not the others. Pure."""
