"""What happens to one shard: read, tokenize, batch, forward, write. Knows nothing of jobs or of other shards."""
