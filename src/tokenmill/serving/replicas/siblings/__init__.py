"""Several API processes on one socket: the first tells its siblings of the parts, and asks them for their requests."""
