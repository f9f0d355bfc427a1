"""Studies of many runs: grids, hyper-parameter searches and papers' tables."""
