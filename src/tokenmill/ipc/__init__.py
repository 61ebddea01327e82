"""Sockets, heartbeats and signals that the processes of a server share, besides their messages."""
