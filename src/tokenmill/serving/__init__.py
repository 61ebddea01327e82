"""Serving: HTTP, text and the processes behind a server."""
