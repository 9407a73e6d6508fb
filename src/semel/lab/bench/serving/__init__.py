"""`semel bench serve`: bare vLLM's server and `semel serve` side by side; one client alternates between them."""
