"""vLLM's routes for models that pool: embeddings, classes, scores; Cohere's for embeddings and reranking."""
