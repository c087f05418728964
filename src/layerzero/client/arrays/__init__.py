"""Arrays of the caller's libraries, from and to memory."""
