"""Trained models of finished runs: predictions, probes, exported files."""
