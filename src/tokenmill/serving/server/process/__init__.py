"""The API process: HTTP in front of the supervised engines and text workers, from start to end."""
