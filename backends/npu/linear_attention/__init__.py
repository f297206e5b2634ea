"""Short convolutions, state spaces and delta rules."""
