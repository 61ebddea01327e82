"""What every scheduler must hold, tried on random traces without a model."""
