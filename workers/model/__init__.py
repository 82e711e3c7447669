"""Which model, where its files are, and what they say about text. Loads no weights and runs nothing."""
