"""HTTP itself: connections, bodies, errors, guards. Knows nothing of what is asked."""
