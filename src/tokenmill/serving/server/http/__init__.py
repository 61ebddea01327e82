"""HTTP itself: connections, bodies, errors, guards. Knows nothing of what requests ask for."""
