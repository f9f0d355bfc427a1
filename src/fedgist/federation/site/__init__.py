"""A site: its file, its policy and ledger, its part of a run, and its state on disk."""
