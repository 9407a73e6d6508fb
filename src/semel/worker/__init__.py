"""Workers: the process that embeds the engine. Imports nothing of `semel.frontend`."""
