"""`semel verify`: what it finds, and that it finds what is planted."""
