"""What runs in other environments."""
