"""The attention kernel has the bits of the whole sequence for one query, on a GPU or interpreted.

Its tiles of keys lie at the same tokens however many queries a call has, and whatever a cache has
dropped or a batch has put before them.
"""

import pytest
import torch

import liger_multi
from liger_multi import ops
from tests import harness

pytest.importorskip("triton")
if (DEVICE := harness.device_of("triton")) is None:
    pytest.skip("kernels on a CPU need TRITON_INTERPRET=1", allow_module_level=True)

from liger_multi.patching.attention import interface
from tests.decoding import all_ones, model, prompt, roll_out, train

DTYPES = (torch.float32, torch.bfloat16)
LENGTH, WINDOW = 300, 70
OPTIONS = {
    "causal": {},
    "window": {"window": WINDOW},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def by_rows():
    with liger_multi.use(attention="triton", deterministic="rows"):
        yield


def inputs(dtype, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, LENGTH, 16) for heads in (4, 2, 2))
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


@by_dtype
@pytest.mark.parametrize("name", OPTIONS)
def test_queries_of_a_cache(name, dtype):
    """One query or several, against as many keys as there are or a longer static cache."""
    q, k, v = inputs(dtype)
    options = {n: x.to(DEVICE, dtype) if n == "sinks" else x for n, x in OPTIONS[name].items()}
    whole = ops.attention(q, k, v, causal=True, **options)
    for start, stop in ((0, 1), (15, 16), (63, 65), (100, 101), (127, 143), (128, 129), (299, 300)):
        queries = q[:, :, start:stop]
        part = ops.attention(queries, k[:, :, :stop], v[:, :, :stop], causal=True, **options)
        assert torch.equal(part, whole[:, :, start:stop]), (start, stop)
        window = options.pop("window", LENGTH)
        ends = torch.arange(start + 1, stop + 1, dtype=torch.int32, device=DEVICE)
        ranges = torch.stack([(ends - window).clamp_min(0), ends], -1)[None]
        static = ops.attention(queries, k, v, ranges=ranges, **options)
        assert torch.equal(static, whole[:, :, start:stop]), (start, stop)
        options |= {"window": window} if window < LENGTH else {}


def dropped(x, last, pads):
    """What a window's cache keeps, behind no padding."""
    return x[:, :, last - WINDOW + 1 : last + 1], last - WINDOW + 1, None


def padded(x, last, pads):
    """All tokens, behind some columns of padding."""
    mask = torch.arange(pads + last + 1, device=x.device)[None] >= pads
    return torch.cat([x[:, :, :pads], x[:, :, : last + 1]], 2), 0, mask


@by_dtype
@pytest.mark.parametrize("form", [dropped, padded])
def test_keys_in_other_columns(form, dtype):
    q, k, v = inputs(dtype)
    whole = ops.attention(q, k, v, causal=True, window=WINDOW)
    for last in (80, 128, 200, 299):
        (keys, offset, mask), (values, *_) = (form(x, last, last % 7 + 1) for x in (k, v))
        columns = interface.key_shifts(mask, offset)
        assert columns
        end = torch.full((1, 1), keys.shape[2], dtype=torch.int32, device=DEVICE)
        ranges = torch.stack([end - WINDOW, end], -1)
        ranges = interface.shifted_ranges(ranges, True, columns, (1, int(end)), q.device)
        keys, values = (interface.shifted(x, columns) for x in (keys, values))
        one = ops.attention(q[:, :, last : last + 1], keys, values, ranges=ranges)
        assert torch.equal(one[:, :, 0], whole[:, :, last]), last


def test_gradients_of_shifted_keys():
    """They are those of the keys as they were; columns before them get none."""
    q, k, v = (x[:, :, :70].clone().requires_grad_() for x in inputs(torch.float32, 2))
    columns = (5, 100)
    ranges = interface.shifted_ranges(None, True, columns, (70, 70), q.device)
    shifted = (interface.shifted(x, columns) for x in (k, v))
    with liger_multi.use(deterministic=False):
        ours = torch.autograd.grad(ops.attention(q, *shifted, ranges=ranges).sum(), (q, k, v))
        right = torch.autograd.grad(ops.attention(q, k, v, causal=True).sum(), (q, k, v))
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_model_with_windows_and_padding():
    """Rows of two lengths: tiles lie at fixed tokens in caches, in a padded batch and alone."""
    policy, lengths = model("gemma2").to(DEVICE), [70, 61]
    mask = (torch.arange(70) >= 70 - torch.tensor(lengths)[:, None]).long().to(DEVICE)
    rows, old = roll_out(policy, prompt(70, 2).to(DEVICE), 8, mask=mask, chunk=40)
    for row, length, log_probs in zip(rows, lengths, old, strict=True):
        assert all_ones(train(policy, row[None, 70 - length :], 8), log_probs[None])
