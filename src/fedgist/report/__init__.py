"""Turn run directories into tables, figures and pages; this package only reads files."""
