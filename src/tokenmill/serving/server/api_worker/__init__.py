"""An API process beside the first: the routes it answers itself, and the ones it passes on."""
