"""The API process: HTTP in front of the supervised parts, start and end."""
