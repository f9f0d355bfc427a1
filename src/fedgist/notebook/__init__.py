"""The door for Python: fedgist.run with a user's own objects, and what it shows and returns."""
