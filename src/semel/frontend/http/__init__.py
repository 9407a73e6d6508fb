"""Request bodies in, responses out."""
