"""A model as vLLM declares it: items, fields, prompt rules, processor, shapes."""
