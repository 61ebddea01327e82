"""Counted resources that running requests hold, one file for each kind."""
