"""Media of a request: sources, names, files, digests."""
