"""Sources, plan, commit: from Parquet files to shards, and from attempts to a sealed dataset. No engine, no Ray."""
