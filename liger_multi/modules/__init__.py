"""Modules of a model from outside: their forwards, the arguments of a call, and parameters.

Everything here stands below the layers that use it, and knows no operator.
"""
