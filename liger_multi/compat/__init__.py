"""Names that other libraries look for, served by this one; nothing is installed unasked."""
