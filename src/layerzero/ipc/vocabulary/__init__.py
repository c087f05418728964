"""What all processes call things: ops, tensors, shape classes, policies."""
