"""Several API processes on one socket: the first tells the others of the parts, and asks them for their requests."""
