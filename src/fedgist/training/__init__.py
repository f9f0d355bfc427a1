"""Local training of stacked clients: cohorts, phases, steps, inference, plans."""
