"""All contact with vLLM. Nothing is imported here: its modules load vLLM when they are used."""
