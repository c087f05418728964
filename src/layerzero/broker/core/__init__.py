"""The broker's decisions, pure: events in, actions out, no clock, no socket, no process."""
