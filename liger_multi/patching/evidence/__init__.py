"""Whether a module computes a known formula: its code, what that reads, and trials of a replica."""
