"""`lz top`: what a broker does, in a terminal, now or at a time in its history: docs/history.md. Extra `top`."""
