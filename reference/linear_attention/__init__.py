"""Linear attention and state spaces: recurrences over tokens, computed by chunks."""
