"""Cross-entropy, log-probabilities, softmax, and the linear heads fused with them."""
