"""From URLs to bytes, under a policy."""
