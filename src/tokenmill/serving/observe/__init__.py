"""Metrics for operators, in Prometheus' form. Knows counters and clocks, not the contents of requests."""
