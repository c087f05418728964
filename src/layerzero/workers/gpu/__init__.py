"""A worker's GPU: binding, enqueueing, graphs."""
