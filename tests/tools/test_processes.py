"""How the ranks of a test end."""

import textwrap
import time

import pytest

from tests import harness, processes

KINDS = [
    pytest.param(
        True, marks=pytest.mark.skipif(harness.accelerator() is not None, reason="no fork")
    ),
    False,
]


def ended(folder, body, patience, forked):
    script = folder / "script.py"
    script.write_text(textwrap.dedent(body))
    (one,) = processes.run(script, folder, [["given"]], {"NAMED": "too"}, patience, forked)
    return one


@pytest.mark.parametrize("forked", KINDS)
def test_nothing_of_a_rank_is_taken_apart(tmp_path, forked):
    """A group of gloo that DistributedDataParallel holds last may wait for ever in doing so."""
    body = """
        import os, sys
        class Held:
            def __del__(self):
                print("taken apart")
        held = Held()
        print(sys.argv[1], os.environ["NAMED"])
        """
    assert ended(tmp_path, body, harness.PATIENCE, forked) == (0, "given too\n")


@pytest.mark.parametrize("forked", KINDS)
@pytest.mark.parametrize(
    ("body", "said"), [("assert 1 == 2", "AssertionError"), ("raise SystemExit(0)", "SystemExit")]
)
def test_a_rank_that_fails_says_why(tmp_path, forked, body, said):
    code, text = ended(tmp_path, body, harness.PATIENCE, forked)
    assert code == 1
    assert said in text


@pytest.mark.parametrize("forked", KINDS)
def test_a_rank_that_hangs_says_where(tmp_path, forked):
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(
        textwrap.dedent("""
            import time
            def here():
                print("begun", flush=True)
                time.sleep(600)
            here()
            """)
    )
    process = processes.Process(script, [], {}, log, forked)
    while not (log.exists() and "begun" in log.read_text()):
        time.sleep(0.1)
    code, text = process.end(0)
    assert code is None
    assert "in here" in text
    assert "no answer in time" in text
