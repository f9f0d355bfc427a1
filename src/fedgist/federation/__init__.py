"""What makes a run: recipes, the round loop, records and checkpoints."""
