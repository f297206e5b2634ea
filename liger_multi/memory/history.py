"""The history of an accelerator's allocator, joined with what a recorder saw.

The allocator knows every block, also those inside native kernels, and nothing about models; a
recorder knows modules and operators. A storage belongs to the block that stood at its address when
it was first seen.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from liger_multi.memory.recorder import OTHER, TEMPORARY, Block

OLDER, HIDDEN = "older than the step", "inside a kernel"


@dataclass
class Joined:
    """Blocks, events and phases as :func:`liger_multi.memory.breakdown.summarize` wants them."""

    blocks: list[Block] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)
    facts: dict[str, int] = field(default_factory=dict)


def join(
    entries: Sequence[Mapping[str, Any]],
    seen: Sequence[Block],
    phases: Sequence[tuple[float, str]],
    allocated: int,
    reserved: int,
) -> Joined:
    """Allocator events with the names that a recorder has for them.

    Args:
        entries: Of the device's trace in a snapshot: ``action``, ``addr``, ``size``, ``time_us``.
        seen: Blocks of the recorder, with address and time.
        phases: ``(time in microseconds, phase)``.
        allocated: Bytes allocated when the history began.
        reserved: Bytes reserved then.
    """
    made = Joined()
    owners = _owners(entries, [b for b in seen if b.phase])
    at_start: dict[int, int] = {}
    for block in seen:
        if not block.phase:
            at_start[block.address] = _open(made, block, block.size)
    rest = max(0, allocated - sum(b.size for b in made.blocks))
    older = _open(made, Block(rest, role=OTHER, op=OLDER), rest)
    live: dict[int, tuple[int, int]] = {}
    now, names = allocated, iter(phases)
    following = next(names, None)
    best, kept = -1, reserved
    for place, entry in enumerate(entries):
        action, address, size = entry["action"], entry.get("addr", 0), entry.get("size", 0)
        while following is not None and entry.get("time_us", 0) >= following[0]:
            made.phases.append((len(made.events), following[1]))
            following = next(names, None)
        if action == "alloc":
            phase = made.phases[-1][1] if made.phases else ""
            block = owners.get(place) or Block(size, phase, op=HIDDEN, role=TEMPORARY)
            live[address] = (_open(made, block, size), size)
            now += size
        elif action == "free_requested":
            index, size = live.pop(address, (at_start.pop(address, older), size))
            made.events.append((index, -size))
            now -= size
        elif action == "segment_alloc":
            reserved += size
        elif action == "segment_free":
            reserved -= size
        kept = max(kept, reserved)
        if now > best:
            best = now
            made.facts = {"allocated": now, "reserved": reserved, "fragmentation": reserved - now}
            made.facts["hidden"] = sum(
                size for i, size in live.values() if made.blocks[i].op == HIDDEN
            )
    made.facts["largest reserved"] = kept
    return made


def _open(made: Joined, block: Block, size: int) -> int:
    made.blocks.append(block)
    made.events.append((len(made.blocks) - 1, size))
    return len(made.blocks) - 1


def _owners(entries: Sequence[Mapping[str, Any]], seen: Sequence[Block]) -> dict[int, Block]:
    """The recorder's block of an entry: the first one seen at its address until the next entry."""
    places: dict[int, list[int]] = {}
    for place, entry in enumerate(entries):
        if entry["action"] == "alloc":
            places.setdefault(entry["addr"], []).append(place)
    times = {a: [entries[p].get("time_us", 0) for p in found] for a, found in places.items()}
    owners: dict[int, Block] = {}
    for block in seen:
        found = bisect.bisect_right(times.get(block.address, []), block.time) - 1
        if found >= 0:
            owners.setdefault(places[block.address][found], block)
    return owners
