"""Secure sums: a server learns the total of its sites' messages, and none of the messages.

The protocol is that of Bonawitz et al. 2017, *Practical secure aggregation for privacy-preserving
machine learning* (ACM CCS, https://doi.org/10.1145/3133956.3133982), figure 4 with its steps
against active adversaries. See docs/decisions/0060.
"""
