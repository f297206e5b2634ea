import sys, torch, triton, triton.language as tl
from liger_multi.backends.triton import common

if sys.argv[1] == "software":

    def never(_semantic=None, _builder=None):
        return tl.constexpr(False)

    setattr(never, "__triton_builtin__", True)
    common._nvidia = never
from liger_multi import ops
from liger_multi.backends.triton.common import log2_near


@triton.jit
def k(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, log2_near(tl.load(x + i, mask=i < n, other=1.0)), mask=i < n)


for lo, hi in ((1e-30, 1e-3), (0.1, 0.5), (0.5, 0.9), (0.9, 0.999), (0.999, 1 - 1e-6)):
    x = torch.empty(1 << 20, device="cuda", dtype=torch.float64).uniform_(lo, hi).float()
    y = torch.empty_like(x)
    k[(1 << 10,)](x, y, x.numel(), 1024)
    e = y.double() - x.double().log2()
    print(
        sys.argv[1],
        f"log2 on {lo:g}..{hi:g}: max {e.abs().max():.2e} mean {e.mean():.2e} relative {(e / x.double().log2()).abs().max():.2e}",
    )
torch.manual_seed(0)
for eps in (1.0, 0.1, 0.01):
    z = torch.randn(256, 32000, device="cuda") * 1.5
    d = z + torch.randn_like(z) * eps
    for form in ("log_prob", "logits"):
        s, t = (z, d) if form == "logits" else (z.log_softmax(-1), d.log_softmax(-1))
        for beta in (0.5, 0.1):
            a = s.clone().requires_grad_()
            l = ops.jsd(a, t, beta=beta, form=form, reduction="none")
            (g,) = torch.autograd.grad(l.sum(), a)
            S, T = s.double().requires_grad_(), t.double()
            q, p = (S.log_softmax(-1), T.log_softmax(-1)) if form == "logits" else (S, T)
            m = torch.log(beta * p.exp() + (1 - beta) * q.exp())
            L = (beta * p.exp() * (p - m) + (1 - beta) * q.exp() * (q - m)).sum(-1)
            (G,) = torch.autograd.grad(L.sum(), S)
            e = l.double() - L
            print(
                sys.argv[1],
                f"jsd {form} eps {eps} beta {beta}: loss {L.mean():.2e} max error {e.abs().max():.2e} mean {e.mean():.2e}; gradient error over its rms {((g.double() - G).square().mean() / G.square().mean()).sqrt():.2e}",
            )
