"""Rows in and out: Arrow rows of a shard's source files, and one whole Parquet file of finished rows. Knows no task."""
