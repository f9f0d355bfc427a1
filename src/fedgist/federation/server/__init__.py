"""The server of a federation: its rounds, its state after a restart, and its status."""
