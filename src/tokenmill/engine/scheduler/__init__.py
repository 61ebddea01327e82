"""Choose which tokens run in the next step, and for which requests. Knows no torch, no sockets and no clock."""
