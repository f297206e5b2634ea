"""`liger-multi verify` on the simulated NPU: ``python -m ci.npu.verify [options of the command]``.

It needs the environment of :mod:`ci.npu.environment`. A report names the device as simulated.
"""

from __future__ import annotations

import sys

from ci.npu import lowering, simulate
from liger_multi.cli.main import main as command
from liger_multi.testing.verify import cases, child, run

LABEL = "Ascend 910B, simulated on a CPU"


def main() -> int:
    """The command, or one of its child processes, under the simulated device."""
    words = sys.argv[1:]
    with simulate.DEVICE, lowering.launches():
        if words[:1] == ["child"]:
            sys.argv = [__file__, *words[1:]]
            child.main()
            return 0
        cases.IS_SIMULATED = True
        run.CHILD[:] = ["-m", "ci.npu.verify", "child"]
        return command(["verify", "--device", "npu", "--label", LABEL, *words])


if __name__ == "__main__":
    raise SystemExit(main())
