"""The client's end of the broker: sockets, routes, arenas, express lanes, reports."""
