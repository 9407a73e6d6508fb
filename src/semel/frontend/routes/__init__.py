"""The routes of a frontend."""
