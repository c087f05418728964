"""What the broker's loop sleeps on: sockets, frames, and pages that it shares with clients and workers."""
