"""What replaces it: classes of patched modules, how they are swapped in, and how they are restored."""
