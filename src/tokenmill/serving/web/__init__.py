"""The page at `/`: static files that a browser runs, and the hub that brings it what the engines do. Knows no HTTP."""
