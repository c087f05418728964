"""What the user has set: settings, policy, dispatch table, sources of kernels."""
