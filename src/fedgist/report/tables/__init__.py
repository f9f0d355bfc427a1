"""Studies as tables: runs grouped into rows, compared, and set beside a paper's numbers."""
