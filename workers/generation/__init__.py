"""Texts that a decoder writes: how tokens are chosen, which are allowed, how they become text and rows. No model."""
