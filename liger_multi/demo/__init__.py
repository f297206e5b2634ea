"""The demo: real Hugging Face models, trained unpatched and patched on real text, side by side."""
