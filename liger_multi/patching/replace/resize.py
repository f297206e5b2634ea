"""Keep the fused head when a model's vocabulary is resized, which puts a new layer in its place."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

from liger_multi.patching.replace.head import LazyHead, behavior, find_heads, head_refusal
from liger_multi.patching.replace.swap import apply, stock_class, swapped

_MARK = "_liger_multi_resizes"


def follow() -> None:
    """Wrap ``PreTrainedModel.resize_token_embeddings``, once; models without a patch see no change.

    A method of the class, since nothing is written into models: copies would hold the original's.
    """
    library = sys.modules.get("transformers.modeling_utils")
    kind = getattr(library, "PreTrainedModel", None)
    if kind is None or hasattr(kind.resize_token_embeddings, _MARK):
        return
    stock = kind.resize_token_embeddings

    @functools.wraps(stock)
    def resize_token_embeddings(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = [swapped(head) for _, head in find_heads(self)[0] if isinstance(head, LazyHead)]
        result = stock(self, *args, **kwargs)
        for _, head in find_heads(self)[0] if any(before) else ():
            swap = before[0]
            if swap is None or stock_class(head) is not swap.stock or head_refusal(head):
                continue
            if behavior(head) is swap.behavior:
                apply(head, swap)
        return result

    setattr(resize_token_embeddings, _MARK, True)
    kind.resize_token_embeddings = resize_token_embeddings
