"""From the texts of rows to token ids and back, within a limit. Loads no tokenizer and computes with no model."""
