"""The first operator, module or gradient that differs between two runs: ``testing.bisect``."""
