"""What processes share besides messages: sockets, heartbeats, signals."""
