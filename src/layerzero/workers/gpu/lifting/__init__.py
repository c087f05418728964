"""A bound kernel as a lifted call: what it launches, read from captures, and the machine code of that."""
