"""The laboratory: simulate schedules without a model, and measure engines and servers."""
