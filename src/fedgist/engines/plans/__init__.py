"""Execution plans: what runs fastest on a machine, timed before a run's first round."""
