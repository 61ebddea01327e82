"""What an engine shows to whoever watches it; with nobody watching, nothing of it runs."""
