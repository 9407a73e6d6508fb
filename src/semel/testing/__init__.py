"""What tests of semel, and of programs built on it, share. Importing it does nothing."""
