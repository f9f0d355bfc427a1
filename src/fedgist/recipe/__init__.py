"""Recipes: their schema, their reading, and the methods and models that they name."""
