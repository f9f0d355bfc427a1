"""What a server and its sites agree on: the recipe, and what the server makes of it."""
