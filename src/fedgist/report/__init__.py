"""Reports: run directories into tables and pictures; reads files only."""
