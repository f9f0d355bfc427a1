"""The command line."""

import os

# Threads that wait for each other by spinning make the server's learning several times slower where
# other programs use the cores. torch's OpenMP reads this when it is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
