"""Policy: which tokens run in the next step, and on whose account. Knows no torch, no sockets and no clock."""
