"""The encoder cache's decisions: pure functions of keys, sizes and timelines.

`residency` decides which encoder outputs stay, `eviction` which is evicted first, `plan` what to encode in a step, and
`gather` which positions a step's embeddings fill. `host_cache` knows the outputs in the host's memory, over the free
blocks of `extents`, `prefetched` those that came for one request, and `transfers` what a step copies. Keys are opaque
(semel uses digests), requests are ids, and inputs are indices into a request's timeline. Nothing here depends on an
engine, a clock or a tensor.
"""
