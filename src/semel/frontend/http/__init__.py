"""Request bodies and responses."""
