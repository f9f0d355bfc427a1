"""Real federations: a server and its sites over a network, their kits, policies and state."""
