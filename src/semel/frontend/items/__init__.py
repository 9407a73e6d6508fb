"""Items that clients bring along, and whose they are."""
