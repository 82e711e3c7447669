"""What happens to one shard: read, tokenize, batch, forward, write. Knows nothing of jobs or of other shards.

`pipeline` is the journey of the rows, station by station: `parquet` reads, `prompt` makes texts, `tokenization` token
rows, `batch` batches, `forward` or `generation` has the `engine` compute, `results` makes columns, `parquet` writes.
"""
