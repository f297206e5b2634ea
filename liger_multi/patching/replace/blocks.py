"""What a model was before a patch, which comes back in whatever order patches end.

Every block remembers the class that each module had when it began. One that ends while a later one
is still open hands that over: the later block then goes back to where the earlier one began. So no
order of ends leaves anything behind, be they of one thread or of several.
"""

from __future__ import annotations

import itertools
import threading
import weakref

from torch import nn

from liger_multi.patching.replace.swap import (
    apply,
    refuse_buried,
    restore,
    stock_class,
    stock_of,
    swap_of,
)

lock = threading.RLock()
"""Held while classes of modules change: patches of several threads follow one another."""
_open: weakref.WeakSet[Block] = weakref.WeakSet()
_numbers = itertools.count()


class Block:
    """The classes of a model's modules from here on, until :meth:`end` brings them back.

    A block that nobody holds any more is forgotten, and the model stays as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        with lock:
            self.model, self.number = model, next(_numbers)
            self.before = {id(m): (m, type(m)) for m in model.modules()}
            _open.add(self)

    def end(self) -> None:
        """Bring the classes back that no later block holds; modules that came lose the patch.

        Raises:
            PatchError: A class that is no longer ours, and was when the block began.
        """
        with lock:
            if self not in _open:
                return
            _open.discard(self)
            now = list(self.model.named_modules())
            came = {id(m): (m, stock_class(m)) for _, m in now if id(m) not in self.before}
            mine = {}
            # those that left the model while it was patched, too
            for module, kind in (self.before | came).values():
                later = self._next(module)
                if later is None:
                    mine[id(module)] = (module, kind)
                elif stock_of(later.before[id(module)][1]) is stock_of(kind):
                    later.before[id(module)] = (module, kind)
            refuse_buried(
                [
                    (path, m)
                    for path, m in now
                    if id(m) in mine and (id(m) in came or type(m) is not mine[id(m)][1])
                ],
                "unpatch",
            )
            for module, kind in mine.values():
                _give_back(module, kind)

    def forget(self) -> None:
        """Keep what was done since."""
        with lock:
            _open.discard(self)

    def _next(self, module: nn.Module) -> Block | None:
        """The first of the open blocks that began later and hold the module."""
        holding = [b for b in _open if b.number > self.number and id(module) in b.before]
        return min(holding, key=lambda block: block.number, default=None)


def _give_back(module: nn.Module, kind: type[nn.Module]) -> None:
    """Back to a class that the module had, where it still is a form of it."""
    if type(module) is kind or stock_class(module) is not stock_of(kind):
        return
    swap = swap_of(kind)
    if swap is None:
        restore(module)
    else:
        apply(module, swap)
