"""Runs: recipes, the round loop, records and checkpoints."""
