"""`semel bench serve`: bare vLLM's server and `semel serve`, side by side, asked by one client in turns."""
