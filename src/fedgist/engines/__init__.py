"""Engines: where clients live. Each has one verb, ``ask``, and none knows any method."""
