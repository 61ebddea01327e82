"""Start-up: from a config to a running engine or rank."""
