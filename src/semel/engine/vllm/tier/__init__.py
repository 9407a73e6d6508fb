"""The host tier of encoder outputs, and prefetched outputs from the embedding store."""
