"""A proxy between clients and two kinds of servers: those that compute prompts, and those that decode."""
