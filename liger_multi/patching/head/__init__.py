"""The output embedding and its loss; logits are computed only if something reads them."""
