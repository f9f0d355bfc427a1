"""The Python interface: fedgist.run with a user's own objects, its progress and its result."""
