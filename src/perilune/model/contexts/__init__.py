"""What long contexts cost a hybrid stack, beside the same stack all-MLA and with grouped queries.

The walk: `plan` (which sizes) -> `run` (one after the other) -> `stacks`, `gqa` (random layers and
full caches) -> `measure` (graph, kernels, host) beside `roofline` -> `rows` (the file) -> `tables`.
`prefill` fills a cache in chunks.
"""
