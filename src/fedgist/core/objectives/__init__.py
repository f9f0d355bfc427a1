"""Objectives: what a loss and its metrics are for each kind of target."""
