"""Nets as trees of arrays: layers, kernels, adapters, and torch modules of users."""
