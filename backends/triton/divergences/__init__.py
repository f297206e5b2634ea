"""KL and Jensen-Shannon divergence and total variation distance, of rows and of linear heads."""
