"""Sharding: which part of a model is a rank's own. Plain data and one protocol."""
