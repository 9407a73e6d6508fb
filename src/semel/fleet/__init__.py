"""The workers of a frontend: who is there, who gets a request, and what happens if one is lost. No HTTP."""
