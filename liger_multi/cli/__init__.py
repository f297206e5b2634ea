"""The command line: ``liger-multi doctor | explain | config | demo``."""
