"""What a module computes: numerical identification of norms, MLPs, rotary functions and experts."""
