"""The fleet's store of encoder outputs: names, seals, and a small client of Valkey and Redis. No vLLM, no torch.

`names`, `seal`, `replies`, `breaker` and `publishing` are pure. `resp` does the I/O, `nodes` has one or several of it,
and `sealed` puts them together into what a worker calls from its threads.
"""
