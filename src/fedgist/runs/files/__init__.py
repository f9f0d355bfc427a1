"""The files of a run directory: what they hold, how they are written, and the seals on them."""
