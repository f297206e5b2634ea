"""Every operator says by which path it runs on Ascend, and which level that reached."""

import re
from pathlib import Path

from ci.npu import levels
from liger_multi.dispatch.registry import operators

FOLDER = Path(__file__).parents[2] / "backends" / "npu"
CALL = re.compile(r"torch\.ops\.npu\.\w+")


def sources(op):
    """The file of an operator, and the kernel files that it imports, as one text."""
    text = (FOLDER / f"{op}.py").read_text(encoding="utf-8")
    names = set(re.findall(r"(?:npu\.|import )(\w*(?:kernels|logits|launching))\b", text))
    return text, "".join((FOLDER / f"{n}.py").read_text(encoding="utf-8") for n in names)


def test_every_operator_has_a_row():
    assert set(levels.ROWS) == set(operators())


def test_rows_say_what_stands_in_the_folder():
    for op, row in levels.ROWS.items():
        if row.path == levels.REFERENCE:
            assert not (FOLDER / f"{op}.py").exists(), op
            continue
        text, kernels = sources(op)
        assert bool(CALL.search(text)) == ("torch_npu" in row.path), op
        assert bool(kernels) == ("kernel" in row.path), op
        assert row.level == (levels.COMPILED if kernels else levels.SIMULATED), op
