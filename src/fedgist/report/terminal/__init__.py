"""What a terminal shows: the progress of a run, tables, and live views."""
