"""An API process beside the first: what it answers itself, and what it passes on."""
