"""What can be said of Ascend without its packages: limits of operators, and levels.

Limits of torch_npu's operators, one at a time: the last call that fits, the first beyond.
Predicates look at shapes, types and strides alone, so this runs anywhere. Every operator says by
which path it runs on Ascend, and which level that reached.
"""

import re
from pathlib import Path

import pytest
import torch

from ci.npu import levels
from liger_multi.backends.npu.common import limits
from liger_multi.dispatch.registry import OPS, operators

# --- limits ---


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def t(*shape, dtype=BF16):
    """A tensor of no device."""
    return torch.empty(shape, dtype=dtype, device="meta")


def says(said, refusal):
    """Whether a predicate lets a call pass, or refuses it for the reason wanted."""
    return said is None if refusal is None else said is not None and refusal in said


@pytest.mark.parametrize(
    ("x", "refusal"),
    [
        (t(4, 6), None),
        (t(*[1] * 7, 6), None),
        (t(*[1] * 8, 6), "8 axes"),
        (t(0, 6), "got"),
        (t(4, 6, dtype=FP64), "fp32, fp16 or bf16"),
    ],
)
def test_halves(x, refusal):
    assert says(limits.packed_gates(x), refusal)


@pytest.mark.parametrize(
    ("x", "weight", "offset", "refusal"),
    [
        (t(4, 6), t(6), 0.0, None),
        (t(4, 6), None, 0.0, "a weight"),
        (t(4, 6), t(6, dtype=FP32), 0.0, "of the dtype of x"),
        (t(4, 6), t(6), 1.0, "rounded"),
        (t(4, 6, dtype=FP32), t(6, dtype=FP32), 1.0, None),
        (t(6), t(6), 0.0, "2 to 8 axes"),
        (t(*[1] * 8, 6), t(6), 0.0, "2 to 8 axes"),
        (t(0, 6), t(6), 0.0, "2 to 8 axes"),
        (t(4, 6, dtype=FP64), t(6, dtype=FP64), 0.0, "fp32, fp16 or bf16"),
    ],
)
def test_norms(x, weight, offset, refusal):
    assert says(limits.norm(x, weight, offset), refusal)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({}, None),
        ({"order": "0213"}, None),
        ({"order": "2013"}, "BNSD or BSND"),
        ({"shape": (4, 5, 64)}, "4 axes"),
        ({"shape": (2, 4, 0, 64)}, "4 axes"),
        ({"angles": FP32}, "one dtype"),
        ({"rotary": 32}, "all channels"),
        ({"cos": 32}, "all channels"),
        ({"shape": (2, 4, 5, 880)}, None),
        ({"shape": (2, 4, 5, 896)}, "at most 894"),
        ({"shape": (2, 4, 5, 40)}, "multiple of 32 bytes"),
        ({"shape": (999, 4, 5, 64)}, None),
        ({"shape": (1000, 4, 5, 64)}, "fewer than 1000"),
        ({"shape": (2, 999, 1200, 64)}, None),
        ({"shape": (2, 1000, 1200, 64)}, "fewer than 1000"),
        ({"style": "interleaved"}, None),
        ({"style": "interleaved", "batch": 2}, "all sequences share"),
        ({"batch": 2}, None),
        ({"style": "interleaved", "shape": (249, 4, 5, 64)}, None),
        ({"style": "interleaved", "shape": (250, 4, 5, 64)}, "all sequences share"),
    ],
)
def test_rotation(change, refusal):
    at = {"shape": (2, 4, 5, 64), "angles": BF16, "style": "half", "order": "0123", "batch": 1}
    at |= change
    width = at["shape"][-1]
    cos = t(at["batch"], at["shape"][-2], at.get("cos", width), dtype=at["angles"])
    how = (at["style"], at.get("rotary", width), at["order"])
    assert says(limits.rotation(t(*at["shape"]), cos, cos, *how), refusal)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({}, None),
        ({"causal": True}, None),
        ({"sinks": t(4)}, "no sinks"),
        ({"ranges": t(5, 2)}, "the causal one"),
        ({"softcap": 30.0}, "no softcap"),
        ({"k": t(2, 2, 7, 64, dtype=FP32)}, "one dtype"),
        ({"width": 768}, None),
        ({"width": 776}, "768 elements"),
        ({"v": t(2, 2, 7, 32)}, None),
        ({"v": t(2, 2, 7, 72)}, "no wider"),
        ({"heads": 256}, None),
        ({"heads": 258}, "256 heads"),
        ({"rows": 0}, "1048576 tokens"),
        ({"rows": 2**20}, None),
        ({"rows": 2**20 + 1}, "1048576 tokens"),
        ({"rows": 7, "causal": True}, None),
        ({"rows": 8, "causal": True}, "no query that sees no key"),
        ({"rows": 8}, None),
    ],
)
def test_attention(change, refusal):
    at = {"heads": 4, "rows": 5, "width": 64, "causal": False, "softcap": 0.0} | change
    q, k = t(2, at["heads"], at["rows"], at["width"]), at.get("k", t(2, 2, 7, at["width"]))
    rest = (at.get("sinks"), at.get("ranges"), at["causal"], at["softcap"])
    assert says(limits.fused_attention(q, k, at.get("v", k), *rest), refusal)


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({}, None),
        ({"table": "a5"}, "Atlas A2"),
        ({"dtype": FP64}, "fp32, fp16 or bf16"),
        ({"weight": FP32}, "one dtype"),
        ({"rows": 0}, "tokens that have experts"),
        ({"rows": 4, "per": 512}, None),
        ({"rows": 4, "per": 513}, "512 experts"),
        ({"rows": 16777214, "per": 1}, None),
        ({"rows": 16777215, "per": 1}, "16777214 token-expert pairs"),
        ({"experts": 1024}, None),
        ({"experts": 1025}, "1024 groups"),
        ({"hidden": 65535}, None),
        ({"hidden": 65536}, "65535 elements"),
        ({"inner": 32767}, None),
        ({"inner": 32768}, "65535 elements"),
        ({"turned": True}, None),
        ({"strided": True}, "contiguous"),
    ],
)  # fmt: skip
def test_experts(change, refusal):
    at = {"rows": 5, "per": 2, "experts": 3, "hidden": 8, "inner": 6, "dtype": BF16}
    at |= {"weight": change.get("dtype", at["dtype"]), "table": "a2"} | change
    kinds = {"device": "meta", "dtype": at["dtype"]}
    wide, shape = 2 * at["inner"], (at["experts"], at["hidden"], at["inner"])
    first = torch.empty(at["experts"], wide, at["hidden"], device="meta", dtype=at["weight"])
    first = first.mT.contiguous().mT if at.get("turned") else first
    down = torch.empty(shape, **kinds)
    down = torch.empty((*shape[:2], 2 * shape[2]), **kinds)[..., ::2] if at.get("strided") else down
    x = torch.empty(at["rows"], at["hidden"], **kinds)
    index = torch.empty(at["rows"], at["per"], dtype=torch.int64, device="meta")
    said = limits.experts(x, index, first, down, wide, at["table"])
    assert says(said, refusal)


# --- levels ---


FOLDER = Path(__file__).parents[2] / "backends" / "npu"
CALL = re.compile(r"torch\.ops\.npu\.\w+")


def sources(op):
    """The file of an operator or its family, and the kernel files that it imports, as one text."""
    text = home(op).read_text(encoding="utf-8")
    names = set(re.findall(r"(?:npu\.\w+\.|import )(\w*(?:kernels|logits|launching))\b", text))
    return text, "".join(
        path.read_text(encoding="utf-8") for n in names for path in FOLDER.rglob(f"{n}.py")
    )


def home(op):
    """The file that implements an operator, if any."""
    every = (FOLDER / OPS[op].family / f"{op}.py", FOLDER / OPS[op].family / "operators.py")
    return next((path for path in every if path.exists()), None)


def test_every_operator_has_a_row():
    assert set(levels.ROWS) == set(operators())


def test_rows_say_what_stands_in_the_folder():
    for op, row in levels.ROWS.items():
        if row.path == levels.REFERENCE:
            assert home(op) is None, op
            continue
        text, kernels = sources(op)
        assert bool(CALL.search(text)) == ("torch_npu" in row.path), op
        assert bool(kernels) == ("kernel" in row.path), op
        assert row.level == (levels.COMPILED if kernels else levels.SIMULATED), op
