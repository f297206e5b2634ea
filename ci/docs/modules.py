"""The page of modules."""

from __future__ import annotations

import inspect

from ci.docs import NOTE
from ci.docs.docstrings import listed, sections, signature, summary, text_table
from ci.docs.operators import public_operators
from liger_multi import nn

HEAD = """\
```python
import torch
from liger_multi import nn

norm = nn.RMSNorm(64, eps=1e-6)
y = norm(torch.randn(2, 64))
```

For a Hugging Face model, use [`liger_multi.patch`](patching.md) instead.
"""


def page() -> str:
    """The page with every module."""
    modules = {name: getattr(nn, name) for name in nn.__all__}
    texts, lines = {name: sections(module) for name, module in modules.items()}, []
    for name, text in texts.items():
        like, op = " ".join(text["Like"].split()), text["Operator"]
        link = f"[`{op}`](ops/{op}.md)" if op in public_operators() else op
        lines.append([f"[`{name}`](#{name.lower()})", summary(text), like, link])
    out = [NOTE, "", "# Modules", "", inspect.getdoc(nn) or "", "", HEAD]
    out += [*text_table(("Module", "What", "Like", "Operator"), lines), ""]
    for name, text in texts.items():
        make = signature(modules[name].__init__).removesuffix(" -> None")
        code = [make.replace("__init__", name, 1), signature(modules[name].forward)]
        code = [text.replace("(\n    self,\n", "(\n", 1) for text in code]
        out += [f"## {name}", "", "```python", *code, "```", "", listed(text["Args"]), ""]
    return "\n".join(out)
