"""The norms beside the RMSNorm, and dynamic tanh.

RMSNorms of sums, times a gate, modulated by a condition and of powers; layer norm and group norm.
"""

import math
from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from liger_multi.reference.common.chunking import as_rows, row_blocks, statistics_dtype
from liger_multi.reference.common.strict import by_rows
from liger_multi.reference.float8.quantized import with_codes
from liger_multi.reference.norms import rms_norm


class FusedAddRMSNorm:
    """The sum of two tensors and its RMSNorm, in the order of a pre-norm block."""

    @staticmethod
    def forward(
        x: Tensor, residual: Tensor, weight: Optional[Tensor], eps: float, offset: float,
        casting: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """``s = x + residual``, rounded to its dtype; then the norm of what was rounded."""
        s = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
        torch.add(x, residual, out=s)
        y, rstd = rms_norm.forward(s, weight, eps, offset, casting)
        return y, s, rstd

    @staticmethod
    def backward(
        new_residual: Tensor, dy: Optional[Tensor], dnew_residual: Optional[Tensor],
        weight: Optional[Tensor], rstd: Tensor, offset: float, casting: str, needs_x: bool,
        needs_residual: bool, needs_weight: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``ds = d(norm) / ds + dnew_residual`` is the gradient of both terms."""
        s, needs_sum = new_residual, needs_x or needs_residual
        if dy is not None:
            return rms_norm.gradients(
                dy, dnew_residual, s, weight, rstd, offset, casting, needs_sum, needs_weight
            )
        ds = s.new_empty(s.shape if needs_sum else (0,))
        if needs_sum and dnew_residual is not None:
            ds.copy_(dnew_residual)
        if weight is None or not needs_weight:
            return ds, s.new_empty(0)
        return ds, torch.zeros_like(weight)


class FusedScaledAddRMSNorm:
    """The sum of two scaled tensors and its RMSNorm, in the order of a pre-norm block."""

    @staticmethod
    def forward(
        x: Tensor, residual: Tensor, weight: Optional[Tensor], eps: float, offset: float,
        casting: str, x_scale: float, residual_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Scale what is not scaled by 1, then as the plain sum."""
        x = x if x_scale == 1.0 else x * x_scale
        residual = residual if residual_scale == 1.0 else residual * residual_scale
        return FusedAddRMSNorm.forward(x, residual, weight, eps, offset, casting)

    @staticmethod
    def backward(
        new_residual: Tensor, dy: Optional[Tensor], dnew_residual: Optional[Tensor],
        weight: Optional[Tensor], rstd: Tensor, offset: float, casting: str, x_scale: float,
        residual_scale: float, x_dtype: torch.dtype, residual_dtype: torch.dtype, needs_x: bool,
        needs_residual: bool, needs_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The gradient of the sum, scaled for each term."""
        needs = (needs_x, needs_residual, needs_weight)
        ds, dweight = FusedAddRMSNorm.backward(
            new_residual, dy, dnew_residual, weight, rstd, offset, casting, *needs
        )
        dx, dresidual = (
            (ds * by).to(dtype) if needed else ds.new_empty(0, dtype=dtype)
            for by, dtype, needed in (
                (x_scale, x_dtype, needs_x),
                (residual_scale, residual_dtype, needs_residual),
            )
        )
        return dx, dresidual, dweight


# --- gated ---


def _activate(gate: Tensor, activation: str) -> Tensor:
    return torch.nn.functional.silu(gate) if activation == "silu" else torch.sigmoid(gate)


def _slope(gate: Tensor, activation: str) -> Tensor:
    p = torch.sigmoid(gate)
    return p * (1 + gate * (1 - p)) if activation == "silu" else p * (1 - p)


def _scaled(
    n: Tensor, weight: Tensor | None, offset: float, casting: str, dtype: torch.dtype
) -> Tensor:
    """``w * n`` before a gate and the last rounding."""
    if weight is None:
        return n
    if casting == "gemma":
        return n * (offset + weight.to(n.dtype))
    w = weight + offset if offset else weight
    return w * n.to(dtype) if casting == "llama" else w * n


class GatedRMSNorm:
    """RMSNorm of groups times an activated gate, in the order of the Hugging Face classes."""

    @staticmethod
    def forward(
        x: Tensor, gate: Optional[Tensor], weight: Optional[Tensor], eps: float, offset: float,
        casting: str, group_size: int, norm_first: bool, activation: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Normalize block by block of rows; statistics and gate in fp32 (fp64 for fp64)."""
        kind, rows, gates = (
            statistics_dtype(x.dtype),
            as_rows(x),
            None if gate is None else as_rows(gate),
        )
        groups, dtype = x.shape[-1] // group_size, x.dtype
        if weight is not None and casting == "llama" and (gate is None or not norm_first):
            dtype = torch.promote_types(x.dtype, weight.dtype)
        result = x.new_empty(x.shape, dtype=dtype)
        y = result.view(rows.shape)  # the result is no view, so that models may write to it
        rstd = rows.new_empty((rows.shape[0], groups), dtype=kind)
        for block in row_blocks(rows.shape[0], 5 * rows.shape[1] * kind.itemsize):
            f = rows[block].to(kind)
            act = None if gates is None else _activate(gates[block].to(kind), activation)
            if act is not None and not norm_first:
                f = f * act
            parts = f.unflatten(-1, (groups, group_size)) if f.numel() else f[..., None]
            r = torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)
            n = _scaled((parts * r).flatten(-2), weight, offset, casting, x.dtype)
            y[block] = n * act if act is not None and norm_first else n
            rstd[block] = r.squeeze(-1)[:, :groups]
        return result, rstd.view(*x.shape[:-1], groups)

    @staticmethod
    def backward(
        dy: Tensor, x: Tensor, gate: Optional[Tensor], weight: Optional[Tensor], rstd: Tensor,
        offset: float, casting: str, group_size: int, norm_first: bool, activation: str,
        needs_x: bool, needs_gate: bool, needs_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Through the gate; ``du = rstd * (g - n * mean(g * n))`` with ``g = d(w * n) * w``."""
        kind, rows, dys, none = rstd.dtype, as_rows(x), as_rows(dy), x.new_empty(0)
        rstds, gates = as_rows(rstd), none if gate is None else as_rows(gate)
        groups, last = rstds.shape[1], gate is not None and norm_first
        dx = rows.new_empty(rows.shape) if needs_x else none
        dgate = gates.new_empty(gates.shape if needs_gate else (0,))
        dw = None if weight is None or not needs_weight else torch.zeros_like(weight, dtype=kind)
        w = None if weight is None else weight.to(kind) + offset
        for block in row_blocks(rows.shape[0], 8 * rows.shape[1] * kind.itemsize):
            f, g = rows[block].to(kind), dys[block].to(kind)
            z = None if gate is None else gates[block].to(kind)
            act = None if z is None else _activate(z, activation)
            u = f if act is None or last else f * act
            r = rstds[block].repeat_interleave(group_size, -1)
            n = u * r
            rounded = n.to(x.dtype).to(kind) if casting == "llama" and w is not None else n
            if z is not None and last and needs_gate:
                dgate[block] = g * (rounded if w is None else rounded * w) * _slope(z, activation)
            g = g * act if act is not None and last else g
            if dw is not None:
                dw += (g * rounded).sum(0)
            if not needs_x and (last or not needs_gate):
                continue
            g = g if w is None else g * w
            shape = (-1, groups, group_size)
            along = (g * n).view(shape).mean(-1).repeat_interleave(group_size, -1)
            du = (g - n * along) * r
            if needs_x:
                dx[block] = du if act is None or last else du * act
            if z is not None and not last and needs_gate:
                dgate[block] = du * f * _slope(z, activation)
        dweight = none if dw is None or weight is None else dw.to(weight.dtype)
        shaped = dgate if gate is None or not needs_gate else dgate.view(gate.shape)
        return dx.view(x.shape) if needs_x else dx, shaped, dweight


# --- modulated ---


def _slabs(modulations: int, each: int, row_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of modulations, and of the rows of each, that stay below the limit of a block."""
    for some in row_blocks(modulations, each * row_bytes):
        for rows in row_blocks(each, (some.stop - some.start) * row_bytes):
            yield some, rows


def _split(x: Tensor, modulations: int) -> Tensor:
    """(modulations, rows of each, H)."""
    rows = as_rows(x)
    parts: Tensor = rows.unflatten(0, (modulations, rows.shape[0] // max(modulations, 1)))
    return parts


def _row_by_row(
    x: Tensor, weight: Optional[Tensor], eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """The norm of every row alone, on memory of its own, so that its bits show no other row."""
    alone = (row.clone(memory_format=torch.contiguous_format) for row in as_rows(x).split(1))
    made = [rms_norm.forward(row, weight, eps, offset, casting) for row in alone]
    n, rstd = (torch.cat(each) for each in zip(*made, strict=True))
    return n.view(x.shape), rstd.view(x.shape[:-1])


class ModulatedRMSNorm:
    """RMSNorm modulated by a condition, ``norm(x) * (1 + scale) + shift``, in PyTorch's order."""

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, shift: Optional[Tensor], weight: Optional[Tensor], eps: float,
        offset: float, casting: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Norm, product and sum, each rounded where PyTorch rounds it."""
        norm = _row_by_row if by_rows() else rms_norm.forward
        n, rstd = norm(x, weight, eps, offset, casting)
        dtype = torch.promote_types(n.dtype, scale.dtype)
        dtype = dtype if shift is None else torch.promote_types(dtype, shift.dtype)
        y = n.new_empty(n.shape, dtype=dtype)
        if x.numel() == 0:
            return y, rstd
        scales = as_rows(scale if dtype != torch.float64 else scale.double())
        parts, rooms = _split(n, scales.shape[0]), _split(y, scales.shape[0])
        factors, terms = 1 + scales, None if shift is None else as_rows(shift)
        for some, rows in _slabs(
            parts.shape[0], parts.shape[1], 2 * parts.shape[2] * dtype.itemsize
        ):
            made = parts[some, rows] * factors[some, None]
            rooms[some, rows] = made if terms is None else made + terms[some, None]
        return y, rstd

    @staticmethod
    def backward(
        dy: Tensor, x: Tensor, scale: Tensor, shift_dtype: Optional[torch.dtype],
        weight: Optional[Tensor], rstd: Tensor, offset: float, casting: str, needs_x: bool,
        needs_scale: bool, needs_shift: bool, needs_weight: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """``dscale`` sums ``dy * norm``, ``dshift`` sums ``dy``; then the gradients of the norm.

        Norm and product are rounded as PyTorch rounds them. Sums over many rows that nearly cancel
        show it: half an ulp of a term is 4 % of such a sum in bf16.
        """
        kind, scales, none = rstd.dtype, as_rows(scale), x.new_empty(0)
        kind = torch.promote_types(kind, statistics_dtype(scale.dtype))
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else none
        ds = scales.new_zeros(scales.shape if needs_scale else (0,), dtype=kind)
        db = scales.new_zeros(scales.shape if needs_shift else (0,), dtype=kind)
        dw = None if weight is None or not needs_weight else torch.zeros_like(weight, dtype=kind)
        w = None if weight is None else weight.to(kind) + offset
        norm_dtype = rms_norm.output_dtype(x, weight, casting)
        product_dtype = torch.promote_types(norm_dtype, scale.dtype)
        if x.numel():
            count = scales.shape[0]
            xs, dys, rstds = (_split(t, count) for t in (x, dy, rstd.reshape(-1, 1)))
            room, factors = _split(dx, count) if needs_x else none, 1 + scales.to(kind)
            for some, rows in _slabs(xs.shape[0], xs.shape[1], 5 * xs.shape[2] * kind.itemsize):
                n, g = xs[some, rows].to(kind) * rstds[some, rows], dys[some, rows].to(kind)
                rounded = n.to(x.dtype).to(kind) if casting == "llama" else n
                if needs_shift:
                    db[some] += g.sum(1)
                if needs_scale:
                    norm = (rounded if w is None else rounded * w).to(norm_dtype)
                    ds[some] += (g * norm).to(product_dtype).to(kind).sum(1)
                g = g * factors[some, None]
                if dw is not None:
                    dw += (g * rounded).sum((0, 1))
                if needs_x:
                    g = g if w is None else g * w
                    r = rstds[some, rows]
                    room[some, rows] = ((g - n * (g * n).mean(-1, keepdim=True)) * r).to(x.dtype)
        dscale, dshift = ds.to(scale.dtype), db.to(shift_dtype or scale.dtype)
        return (
            dx,
            dscale.view(scale.shape) if needs_scale else dscale,
            dshift.view(scale.shape) if needs_shift else dshift,
            none if dw is None or weight is None else dw.to(weight.dtype),
        )


# --- powers ---

POWERS = (3, 2, 1)  # in the order of the weights


class PolyNorm:
    """Sum of the RMSNorms of the first three powers."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Optional[Tensor], eps: float
    ) -> tuple[Tensor, Tensor]:
        """In fp32 (fp64 for fp64), block by block of rows, rounded once."""
        kind, rows = statistics_dtype(x.dtype), as_rows(x)
        dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
        y, rstd = (
            rows.new_empty(rows.shape, dtype=dtype),
            rows.new_empty(rows.shape[0], 3, dtype=kind),
        )
        w, b = weight.to(kind), None if bias is None else bias.to(kind)
        for block in row_blocks(rows.shape[0], 5 * rows.shape[1] * kind.itemsize):
            f, total = rows[block].to(kind), None
            for i, power in enumerate(POWERS):
                u = f**power
                r = torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)
                rstd[block, i] = r.squeeze(-1)
                term = w[i] * (u * r)
                total = term if total is None else total + term
            assert total is not None
            y[block] = total if b is None else total + b
        return y.view(x.shape), rstd.view(*x.shape[:-1], 3)

    @staticmethod
    def backward(
        dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, bias_dtype: Optional[torch.dtype],
        needs_x: bool, needs_weight: bool, needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The gradient of each power.

        ``du = w r (dy - n mean(dy n))``, ``dx = k x^(k-1) du``, ``dw = sum dy n``.
        """
        kind, rows, dys, rstds = rstd.dtype, as_rows(x), as_rows(dy), as_rows(rstd)
        dx = rows.new_empty(rows.shape) if needs_x else x.new_empty(0)
        dw = weight.new_zeros(3, dtype=kind)
        db = x.new_zeros(1, dtype=kind)
        w = weight.to(kind)
        for block in row_blocks(rows.shape[0], 6 * rows.shape[1] * kind.itemsize):
            f, g = rows[block].to(kind), dys[block].to(kind)
            if needs_bias:
                db += g.sum()
            total = torch.zeros_like(f)
            for i, power in enumerate(POWERS):
                r = rstds[block, i : i + 1]
                n = f**power * r
                products = g * n
                dw[i] += products.sum()
                if needs_x:
                    du = w[i] * r * (g - n * products.mean(-1, keepdim=True))
                    total += du * power * f ** (power - 1)
            if needs_x:
                dx[block] = total
        return (
            dx.view(x.shape) if needs_x else dx,
            dw.to(weight.dtype) if needs_weight else weight.new_empty(0),
            (db if needs_bias else db.new_empty(0)).to(bias_dtype or x.dtype),
        )


# --- layer and group norm ---


class LayerNorm:
    """LayerNorm, ``y = (x - mean) / sqrt(var + eps) * w + b``, in the roundings of PyTorch's."""

    @staticmethod
    def forward(
        x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """PyTorch's kernel; parameters in fp32 keep the statistics of bf16 rows in fp32."""
        kind, rows = statistics_dtype(x.dtype), as_rows(x)
        w, b = (p if p is None else p.to(kind) for p in (weight, bias))
        if w is None and kind != x.dtype:
            w = rows.new_ones(rows.shape[1], dtype=kind)
        result = x.new_empty(x.shape)  # no view, so that models may write to it
        y = result.view(rows.shape)
        mean, rstd = (rows.new_empty(rows.shape[0], 1, dtype=kind) for _ in range(2))
        # only on a CPU the kernel takes rows of another dtype than its parameters
        widen = x.device.type != "cpu"
        for block in row_blocks(rows.shape[0], 3 * rows.shape[1] * kind.itemsize):
            f = rows[block].to(kind) if widen else rows[block]
            y[block], mean[block], rstd[block] = torch.native_layer_norm(f, f.shape[1:], w, b, eps)
        return result, mean.view(x.shape[:-1]), rstd.view(x.shape[:-1])

    @staticmethod
    def backward(
        dy: Tensor, x: Tensor, weight: Optional[Tensor], mean: Tensor, rstd: Tensor,
        bias_dtype: Optional[torch.dtype], needs_x: bool, needs_weight: bool, needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """``dx = rstd * (g - mean(g) - n * mean(g * n))``, ``dw`` sums ``dy * n``, ``db`` ``dy``.

        Here ``n = (x - mean) * rstd`` and ``g = dy * w``.
        """
        kind, rows, dys = rstd.dtype, as_rows(x), as_rows(dy)
        means, rstds = mean.reshape(-1, 1), rstd.reshape(-1, 1)
        dx = torch.empty_like(rows, memory_format=torch.contiguous_format) if needs_x else None
        dw = rows.new_zeros(rows.shape[1] if needs_weight else 0, dtype=kind)
        db = rows.new_zeros(rows.shape[1] if needs_bias else 0, dtype=kind)
        for block in row_blocks(rows.shape[0], 4 * rows.shape[1] * kind.itemsize):
            n, g = (rows[block].to(kind) - means[block]) * rstds[block], dys[block].to(kind)
            if needs_weight:
                dw += (g * n).sum(0)
            if needs_bias:
                db += g.sum(0)
            if dx is not None:
                g = g if weight is None else g * weight.to(kind)
                g = g - g.mean(-1, keepdim=True)
                # n sums to zero, so that the mean of g does not change that of g * n
                dx[block] = (g - n * (g * n).mean(-1, keepdim=True)) * rstds[block]
        dweight, dbias = (
            dw.to(x.dtype if weight is None else weight.dtype),
            db.to(bias_dtype or x.dtype),
        )
        return x.new_empty(0) if dx is None else dx.view(x.shape), dweight, dbias


class GroupNorm:
    """GroupNorm over a sample's groups of channels, in the roundings of PyTorch's own."""

    @staticmethod
    def forward(
        x: Tensor, num_groups: int, weight: Optional[Tensor], bias: Optional[Tensor], eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """PyTorch's kernel, with parameters in fp32: that keeps the statistics in fp32."""
        kind, (samples, channels), positions = (
            statistics_dtype(x.dtype), x.shape[:2], math.prod(x.shape[2:]),
        )  # fmt: skip
        y = x.new_empty(x.shape)
        mean, rstd = (x.new_empty((samples, num_groups), dtype=kind) for _ in range(2))
        if x.numel() == 0:
            return y, mean.zero_(), rstd.zero_()
        # whose kernel on a CPU reads memory without strides
        w, b = (p if p is None else p.to(kind).contiguous() for p in (weight, bias))
        if w is None and kind != x.dtype:
            w = x.new_ones(channels, dtype=kind)
        # only on a CPU the kernel takes values of another dtype than its parameters
        widen = x.device.type != "cpu"
        for block in row_blocks(samples, 3 * channels * positions * kind.itemsize):
            f = (x[block].to(kind) if widen else x[block]).contiguous()
            sizes = (f.shape[0], channels, positions, num_groups)
            y[block], mean[block], rstd[block] = torch.native_group_norm(f, w, b, *sizes, eps)
        return y, mean, rstd

    @staticmethod
    def backward(
        dy: Tensor, x: Tensor, num_groups: int, weight: Optional[Tensor], mean: Tensor,
        rstd: Tensor, bias_dtype: Optional[torch.dtype], needs_x: bool, needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As of a layer norm whose rows are groups; ``dw`` and ``db`` sum a channel's values."""
        kind, (samples, channels) = rstd.dtype, x.shape[:2]
        dx = x.new_empty(x.shape if needs_x else (0,))
        dw = x.new_zeros(channels if needs_weight else 0, dtype=kind)
        db = x.new_zeros(channels if needs_bias else 0, dtype=kind)
        sample_bytes = 5 * math.prod(x.shape[1:]) * kind.itemsize
        for block in row_blocks(samples if x.numel() else 0, sample_bytes):
            shape = (block.stop - block.start, num_groups, channels // num_groups, -1)
            m, r = (t[block, :, None, None] for t in (mean, rstd))
            n = (x[block].to(kind).reshape(shape) - m) * r
            g = dy[block].to(kind).reshape(shape)
            if needs_weight:
                dw += (g * n).sum((0, 3)).flatten()
            if needs_bias:
                db += g.sum((0, 3)).flatten()
            if needs_x:
                g = g if weight is None else g * weight.to(kind).view(num_groups, -1, 1)
                g = g - g.mean((2, 3), keepdim=True)
                # n sums to zero, so that the mean of g does not change that of g * n
                made = (g - n * (g * n).mean((2, 3), keepdim=True)) * r
                dx[block] = made.view(-1, *x.shape[1:]).to(x.dtype)
        dweight = dw.to(x.dtype if weight is None else weight.dtype)
        return dx, dweight, db.to(bias_dtype or x.dtype)


# --- dynamic tanh ---


def _kind(*tensors: Tensor | None) -> torch.dtype:
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return statistics_dtype(torch.float64 if wide else torch.float32)


class DynamicTanh:
    """Dynamic tanh, ``y = weight * tanh(alpha * x) + bias``, rounded once."""

    @staticmethod
    def forward(
        x: Tensor, alpha: Tensor, weight: Optional[Tensor], bias: Optional[Tensor]
    ) -> Tensor:
        """In fp32 (fp64 for fp64), block by block of rows."""
        kind, rows, dtype = _kind(x, alpha, weight, bias), as_rows(x), x.dtype
        for t in (alpha, weight, bias):
            dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
        w, b = (None if t is None else t.to(kind) for t in (weight, bias))
        a = alpha.reshape(1).to(kind)
        y = rows.new_empty(rows.shape, dtype=dtype)
        for block in row_blocks(rows.shape[0], 3 * rows.shape[1] * kind.itemsize):
            t = torch.tanh(a * rows[block].to(kind))
            t = t if w is None else t * w
            y[block] = t if b is None else t + b
        return y.view(x.shape)

    @staticmethod
    def backward(
        dy: Tensor, x: Tensor, alpha: Tensor, weight: Optional[Tensor],
        bias_dtype: Optional[torch.dtype], needs_x: bool, needs_alpha: bool, needs_weight: bool,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """``dx = dy w alpha (1 - t^2)``; ``dalpha`` sums ``dy w (1 - t^2) x``, ``dw`` ``dy t``."""
        kind, rows, dys, none = _kind(dy, x, alpha, weight), as_rows(x), as_rows(dy), x.new_empty(0)
        a, w = alpha.reshape(1).to(kind), None if weight is None else weight.to(kind)
        cols = rows.shape[1]
        dx = rows.new_empty(rows.shape) if needs_x else none
        da = rows.new_zeros(1 if needs_alpha else 0, dtype=kind)
        dw = rows.new_zeros(cols if needs_weight else 0, dtype=kind)
        db = rows.new_zeros(cols if needs_bias else 0, dtype=kind)
        for block in row_blocks(rows.shape[0], 5 * cols * kind.itemsize):
            f, g = rows[block].to(kind), dys[block].to(kind)
            t = torch.tanh(a * f)
            if needs_bias:
                db += g.sum(0)
            if needs_weight:
                dw += (g * t).sum(0)
            if needs_x or needs_alpha:
                # 1 - t^2 has no digit left where t is nearly 1
                g = (g if w is None else g * w) * torch.cosh(a * f).pow(-2)
                if needs_alpha:
                    da += (g * f).sum()
                if needs_x:
                    dx[block] = g * a
        dweight = none if weight is None else dw.to(weight.dtype)
        dalpha = da.to(alpha.dtype)
        return (
            dx.view(x.shape) if needs_x else dx,
            dalpha.view(alpha.shape) if needs_alpha else dalpha,
            dweight,
            db.to(bias_dtype or x.dtype),
        )


OPERATORS = {
    "rms_norm_quantized": rms_norm.quantized,
    "fused_add_rms_norm": FusedAddRMSNorm,
    "fused_add_rms_norm_quantized": with_codes(FusedAddRMSNorm, visible=2),
    "fused_scaled_add_rms_norm": FusedScaledAddRMSNorm,
    "gated_rms_norm": GatedRMSNorm,
    "modulated_rms_norm": ModulatedRMSNorm,
    "poly_norm": PolyNorm,
    "layer_norm": LayerNorm,
    "layer_norm_quantized": with_codes(LayerNorm),
    "group_norm": GroupNorm,
    "dyt": DynamicTanh,
}
