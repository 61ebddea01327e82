"""Serve routes that llama.cpp's server has, for clients that were written for it."""
