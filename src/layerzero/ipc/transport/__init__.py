"""What crosses sockets: frames, messages, control connections, keys."""
