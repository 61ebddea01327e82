"""Durable batches: files of requests that are answered beside interactive ones, and outlive every process.

Knows no HTTP and no engine: `runner.py` is given a function that answers a line.
"""
