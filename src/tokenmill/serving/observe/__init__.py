"""What operators see: Prometheus metrics. Knows counters and clocks, not requests' contents."""
