"""The demo: real Hugging Face models, trained stock and patched on real text, side by side."""
