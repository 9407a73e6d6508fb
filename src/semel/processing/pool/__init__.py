"""A pool of processes that decode and preprocess."""
