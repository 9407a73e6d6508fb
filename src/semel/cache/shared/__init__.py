"""Features in memory that local processes share: the cache, its segment, and leases on its ranges."""
