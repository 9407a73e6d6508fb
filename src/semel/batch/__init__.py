"""OpenAI's batch files against a server: the lines, the order they are sent in, the results, the requests."""
