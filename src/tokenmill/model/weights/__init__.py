"""Checkpoints: find and fetch their folder, check every file and tensor, and stream them into a decoder."""
