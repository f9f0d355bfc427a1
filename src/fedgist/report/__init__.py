"""Run directories into tables, pictures and pages; reads files only."""
