"""What continuous integration runs.

Here stand the helpers of the workflow and the checks; :mod:`ci.docs` makes pages, :mod:`ci.static`
compiles every kernel for eight GPUs and keeps what it costs in ``baseline.txt``, :mod:`ci.npu`
simulates Ascend, ``docker/`` has the images and ``constraints/`` the versions. What measures stands
in :mod:`benchmarks`.
"""
