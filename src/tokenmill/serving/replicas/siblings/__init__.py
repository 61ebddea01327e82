"""Several API processes on one socket, where there are: what the first tells its siblings, and what they know by it."""
