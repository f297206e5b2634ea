"""What people read and write: YAML and JSON files, pages of tables, and pictures."""
