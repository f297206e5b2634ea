"""What a patch call finds in a model: which modules each operator serves, leaves or restores."""
