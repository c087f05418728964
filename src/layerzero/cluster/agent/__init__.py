"""The agent of a node: it starts the node's broker, watches it, and answers for it."""
