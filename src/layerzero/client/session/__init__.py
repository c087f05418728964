"""The conductor of a call, from its arguments to its result."""
