"""Pooling: which states of a prompt make its vector, and what follows them. Knows no torch."""
