"""What continuous integration runs: checks, generated pages, measurements."""
