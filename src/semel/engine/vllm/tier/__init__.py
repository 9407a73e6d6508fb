"""The host tier of encoder outputs, and arrivals from the embedding store."""
