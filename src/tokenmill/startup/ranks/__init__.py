"""Ranks: start the processes of one engine, let them find each other, and end them."""
