"""Linear attention and state spaces: recurrences and convolutions over tokens."""
