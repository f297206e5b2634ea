"""Which operators are right on this machine: ``liger-multi verify``.

:mod:`.cases` lists what is checked, with the samples, tolerances and checks of the suite.
:mod:`.child` runs cases in a process of its own, :mod:`.run` starts and replaces such processes and
words the result, and :mod:`.quarantine` turns findings into configuration.
"""
