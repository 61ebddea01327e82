"""Recurrent states: which slot of their memory is whose, and what is kept of prefixes. Knows no torch."""
