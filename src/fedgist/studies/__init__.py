"""Many runs: side by side, on grids, in searches, for papers' tables. Each is an ordinary run."""
