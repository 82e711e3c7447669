"""Side by side with peers, and the data of the demo. Not installed; run from the repository's root with `python -m`."""
