"""The commands of the workshop, added to `semel` through the entry point `semel.commands`."""
