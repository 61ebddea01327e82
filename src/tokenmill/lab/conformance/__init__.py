"""Try what every scheduler must hold on random traces, without a model."""
