"""Runs: rounds, evaluation, records, checkpoints, and the use of finished runs."""
