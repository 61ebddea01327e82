"""The engine: which tokens run when, on whose pages."""
