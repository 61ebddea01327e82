"""Ranks: how the processes of one engine are started, find each other and end."""
