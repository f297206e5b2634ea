"""Linear attention and state space models: causal convolutions."""
