"""What parts of a patch read of a model, and which modules reach them."""

import sys
from pathlib import Path

import pytest
from torch import nn

import liger_multi
from liger_multi.patching.evidence.facts import ModelFacts
from tests.models import build

PACKAGE = str(Path(liger_multi.__file__).parent)
MODULES = {
    "norm": "model.layers.0.input_layernorm",
    "mlp": "model.layers.0.mlp",
    "attention": "model.layers.0.self_attn",
    "linear layer": "model.layers.0.mlp.up_proj",
}


@pytest.mark.parametrize("path", MODULES.values(), ids=MODULES)
def test_patch_walk_of_a_module(path):
    """Few functions in few files receive a module, and none of parts that it does not concern."""
    model, places = build("llama"), set()
    module = model.get_submodule(path)

    def called(frame, event, arg):
        code, received = frame.f_code, [value is module for value in frame.f_locals.values()]
        if event == "call" and any(received) and code.co_filename.startswith(PACKAGE):
            places.add((code.co_filename, code.co_firstlineno))

    sys.setprofile(called)
    try:
        liger_multi.patch(model)
    finally:
        sys.setprofile(None)
    assert 3 < len(places) <= 40
    assert len({file for file, _ in places}) <= 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


def test_a_class_is_asked_once():
    facts, asked = ModelFacts(nn.Sequential(Block(), Block())), []

    def accepts(own):
        asked.append(own.module_class)
        return own.module_class in (nn.Linear, nn.LayerNorm)

    accepted = facts.of_class(accepts)
    assert asked == [nn.Sequential, Block, nn.Linear, nn.LayerNorm]
    parts = ("first", "second", "norm")
    assert [path for path, _ in accepted] == [f"{n}.{part}" for n in (0, 1) for part in parts]
    assert facts.with_linears(2) == facts.with_children({"first", "second"}, 2)
    assert [path for path, _ in facts.with_linears(2)] == ["0", "1"]
    assert facts.around("1.norm") == [facts.root, facts.root[1]]
