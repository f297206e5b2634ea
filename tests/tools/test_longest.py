"""Where the search for the longest sequence begins."""

import pytest

from benchmarks import recompute


@pytest.mark.parametrize("room", [90_000, 110_000, 300_000, 1_000_000])
def test_the_end_is_found_on_the_line_that_rules_there(room):
    """Short lengths peak at another moment, whose line has a third of the slope."""
    asked = []

    def peak(tokens):
        asked.append(tokens)
        return max(60_000 + tokens, 20_000 + 3 * tokens)

    found = recompute.extrapolated(peak, room)
    assert peak(found) == pytest.approx(room, rel=0.02)
    assert len(asked) < 9


def test_little_room_ends_at_once():
    assert recompute.extrapolated(lambda tokens: 10**6 + tokens, 1000) == recompute.LENGTH_STEP
