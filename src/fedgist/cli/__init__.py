"""Command-line interface of fedgist."""

import os

# Threads that wait for each other by spinning slow the server's training several times if
# other programs use the cores. torch's OpenMP reads this when it is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
