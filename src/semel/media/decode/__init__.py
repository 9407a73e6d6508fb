"""From bytes to pixels and samples, under limits."""
