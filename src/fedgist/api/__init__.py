"""Python API: ``fedgist.run`` with a user's own objects, its progress display and its result."""
