"""Runs: rounds, evaluation, records, checkpoints, and what is done with finished runs."""
