"""Train a model without each symbol that a line of the input names, in a child process each.

``python without_symbol.py PATH ...`` has the whole table as arguments. A ``getattr`` that
``_torch_private`` is given before it runs hides symbols from it alone: PyTorch itself may need
them. Every answer is a line of JSON: the traceback, if any, and what was logged.
"""

import builtins
import importlib.util
import json
import logging
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import transformers

NAME = "liger_multi._torch_private"
LATE = ("torch._dynamo.", "torch._subclasses.", "torch.utils._device.")


def hide(path, table):
    """Import the module of private symbols as a PyTorch without ``path`` would have it do."""
    package = importlib.util.find_spec("liger_multi").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location(NAME, Path(package) / "_torch_private.py")
    module = importlib.util.module_from_spec(spec)
    hidden = {p.rpartition(".")[2] for p in (table if path == "all of them" else [path])}

    def getattr(owner, name, *default):
        if name in hidden and isinstance(name, str):
            if default:
                return default[0]
            raise AttributeError(name)
        return builtins.getattr(owner, name, *default)

    module.getattr = getattr
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module


def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


IDS = torch.arange(24).view(2, 12) * 7 % 101


def step(trained):
    """The loss and the weights after a step of training."""
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    loss = trained(input_ids=IDS, labels=IDS).loss
    loss.backward()
    optimizer.step()
    return loss.detach(), [p.detach() for p in trained.parameters()]


def check(path, table, log):
    private = hide(path, table)
    logging.getLogger("liger_multi").addHandler(log)
    import liger_multi

    patched = model()
    report = liger_multi.patch(patched)
    assert report.entries, report
    loss, weights = step(patched)
    torch.testing.assert_close(loss, EXPECTED[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights, EXPECTED[1], rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert step(patched)[0] < loss
    with torch.no_grad():
        assert patched(input_ids=IDS).logits.argmax(-1).shape == IDS.shape
    liger_multi.unpatch(patched)
    for row in private.SYMBOLS:
        if row.paths == (path,) and not path.startswith(LATE):
            assert row.absent


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def in_a_child(path, table):
    with tempfile.TemporaryFile("w+") as file:
        child = os.fork()
        if not child:
            log, error = Lines(), ""
            try:
                check(path, table, log)
            except BaseException:
                error = traceback.format_exc()
            json.dump((error, log.lines), file)
            file.flush()
            os._exit(0)
        os.waitpid(child, 0)
        file.seek(0)
        return json.load(file)


torch.set_num_threads(1)
EXPECTED = step(model())

if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(in_a_child(line.strip(), sys.argv[1:])), flush=True)
