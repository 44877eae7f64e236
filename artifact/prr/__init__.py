"""Predict, Reuse, Repair (arXiv 2606.30389): which KV blocks the next step will select, and how well that is known."""
