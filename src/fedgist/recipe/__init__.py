"""Recipes: their schema, how they are read, and what they name."""
