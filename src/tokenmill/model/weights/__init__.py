"""Checkpoints: finding and fetching their folder, checking every file and tensor, and streaming them into a decoder."""
