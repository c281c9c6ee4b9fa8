"""Training: sources and corpus, tokenizer, token shards, the trainer and its recipes."""
