"""Rows that are spread over ranks: loss and gradients are those of one process."""

# ruff: noqa: E402  (what needs transformers is imported after the skip)

import contextlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
from packaging.version import Version
from transformers import masking_utils

from liger_multi.patching.attention import interface
from tests import harness, shard_models

OLDER = Version(transformers.__version__) < Version("5.24")
BODY = """
import datetime
import sys
import torch
import torch.distributed as dist
from liger_multi.patching import register_attention
from tests import shard_models

rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo",
    init_method=f"file://{meeting}",
    rank=rank,
    world_size=RANKS,
    timeout=datetime.timedelta(seconds=LIMIT),
)
register_attention()
torch.set_num_threads(1)
for name in NAMES:
    shard_models.check(name, CHECKPOINTING)
dist.destroy_process_group()
print("done")
"""


ROOT = Path(__file__).parents[2]
CHECK = """for name in NAMES:
    shard_models.check(name, CHECKPOINTING)"""
BODY = BODY.replace("LIMIT", "1800")


def run(folder, count, names, checkpointing=False, call="check"):
    # gpt_oss and Kimi Linear are models of the sweep, the others of transformers
    names = tuple(n for n in names if not n.startswith("Qwen3_5") or hasattr(transformers, n))
    body = BODY.replace("RANKS", str(count)).replace("NAMES", repr(names))
    body = body.replace("CHECKPOINTING", str(checkpointing)).replace(
        "models.check", f"models.{call}"
    )
    harness.in_processes(folder, body, count)


@pytest.mark.slow
@pytest.mark.skipif(OLDER, reason="the committed list is of transformers 5.24")
def test_types_as_on_the_page(tmp_path):
    """Attention to later tokens sees padding, an indexer has masks of all tokens; as committed."""
    names = [
        "bert/BertLM",
        "/RobertaForC",
        "gemma3n_text",
        "deepseek_v32",
        "mamba/MambaForC",
        "llama/LlamaForC",
    ]
    harness.python("-m", "tests.sweep", "--shards", *names, "--json", tmp_path / "out.json")
    actual = json.loads((tmp_path / "out.json").read_text())
    committed = json.loads((ROOT / "tests" / "sweep" / "shards.json").read_text())["pairs"]
    expected = {one["cls"]: one["status"] for one in committed}
    assert len(actual) == 6
    for one in actual:
        assert one["status"] == expected[one["cls"]], one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "count", "seconds"),
    [
        ("data_parallel()", 4, 1800),
        ("restart(FOLDER)", 2, 1800),
        ("measured()", 2, 1800),
        ("ended()", 2, shard_models.SECONDS),
    ],
)
def test_engines(call, count, seconds, tmp_path):
    """FSDP2 on two axes, a restart from a checkpoint, estimated peaks, and a rank that ends."""
    body = BODY.replace("RANKS", str(count)).replace("1800", str(seconds))
    call = call.replace("FOLDER", repr(str(tmp_path / "checkpoint")))
    harness.in_processes(tmp_path, body.replace(CHECK, f"shard_models.{call}"), count)


MODELS = [
    ("LlamaForCausalLM", "MixtralForCausalLM", "Gemma3ForCausalLM", "gpt_oss"),
    ("Qwen3NextForCausalLM", "Lfm2ForCausalLM", "Mamba2ForCausalLM", "BambaForCausalLM"),
    ("Qwen3_5ForCausalLM", "FalconH1ForCausalLM", "KimiLinearForCausalLM"),
]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("names", MODELS, ids=lambda names: names[0])
def test_spread_rows_train_as_whole_ones(names, count, tmp_path):
    if names[0] != "LlamaForCausalLM" and OLDER:
        pytest.skip("mixers of older transformers are refused where no operator serves them")
    run(tmp_path, count, names)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["check", "forest"])
def test_layers_that_are_computed_again(call, tmp_path):
    run(tmp_path, 2, ("LlamaForCausalLM", "Qwen3_5ForCausalLM"), checkpointing=True, call=call)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_replayed_routes(count, checkpointing, tmp_path):
    run(tmp_path, count, ("MixtralForCausalLM",), checkpointing, call="routed")


@pytest.mark.slow
@pytest.mark.skipif(OLDER, reason="types and arguments of transformers 5.24")
def test_images(tmp_path):
    body = BODY.replace("RANKS", "2").replace("NAMES", repr(("llava", "qwen2_vl", "qwen3_vl")))
    call = "shard_models.pictured(name)"
    harness.in_processes(tmp_path, body.replace("shard_models.check(name, CHECKPOINTING)", call), 2)


def test_trees(tmp_path):
    run(tmp_path, 2, ("LlamaForCausalLM",), call="forest")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("names", MODELS, ids=lambda names: names[0])
def test_trees_of_every_mixer(names, count, tmp_path):
    """Windows, sinks, routers, recurrences and convolutions along paths that cross shares."""
    if names[0] != "LlamaForCausalLM" and OLDER:
        pytest.skip("mixers of older transformers are refused where no operator serves them")
    run(tmp_path, count, names, call="forest")


CALLS = """shard_models.outside("LlamaForCausalLM", {})
shard_models.outside("LlamaForCausalLM", {"fused_linear_cross_entropy": False})
shard_models.outside("MixtralForCausalLM", {}, ["of each token"])
shard_models.headless()
shard_models.other_heads()
shard_models.interrupted()
shard_models.compiled()
shard_models.ulysses()"""


@pytest.mark.parametrize("count", [2, 4])
def test_losses_outside_interrupts_and_shares_of_a_caller(count, tmp_path):
    harness.in_processes(tmp_path, BODY.replace("RANKS", str(count)).replace(CHECK, CALLS), count)


def test_generation_and_undivided_heads_are_refused(tmp_path):
    body = BODY.replace("RANKS", "3")
    body = body.replace("shard_models.check(name, CHECKPOINTING)", "shard_models.refuse()")
    harness.in_processes(tmp_path, body.replace("NAMES", "[0]"), 3)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", [(40,), (11, 6, 23)])
def test_bisected_ranges_equal_dense_masks(window, lengths, monkeypatch):
    config = transformers.MistralConfig(sliding_window=window, num_hidden_layers=1)
    config._attn_implementation = interface.NAME
    interface.register_attention()
    create = masking_utils.create_causal_mask
    create = masking_utils.create_sliding_window_causal_mask if window else create
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    embeds = torch.zeros(1, 40, 8)
    # versions of transformers name the cache and the embeddings differently; 5.0 wants places
    arguments = {"attention_mask": None, "position_ids": positions}
    arguments |= dict.fromkeys(("past_key_values", "cache"))
    arguments |= dict.fromkeys(("inputs_embeds", "input_embeds"), embeds)
    arguments |= {"cache_position": torch.arange(40)}
    names = inspect.signature(create).parameters
    arguments = {name: value for name, value in arguments.items() if name in names}
    masks = []
    for long in (10**9, 1):
        monkeypatch.setattr(interface, "LONG", long)
        masks.append(create(config, **arguments))
    assert (masks[0].ranges is None) == (window is None and len(lengths) == 1)
    if masks[0].ranges is None:
        assert masks[1].plain
    else:
        assert torch.equal(masks[0].ranges, masks[1].ranges)


# --- two hosts on one machine: namespaces with a cable between them, and no other network ---

ADDRESSES = ("10.231.77.1", "10.231.77.2")
HOSTS = BODY.replace("RANKS", "2").replace("file://{meeting}", "tcp://{meeting}")


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Names of two namespaces; the cable's ends are their only links besides loopback."""
    names = [f"rows{os.getpid()}{end}" for end in "ab"]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)
            # both ends are made inside, so that no other network ever has them
            ip(
                "-n",
                names[0],
                "link",
                "add",
                "cable",
                "type",
                "veth",
                "peer",
                "cable",
                "netns",
                names[1],
            )
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        yield names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        ("check('LlamaForCausalLM')", 1800),
        ("restart(FOLDER)", 1800),
        ("ended()", shard_models.SECONDS),
        ("ended(cut=True)", shard_models.SECONDS),
    ],
)
def test_two_hosts(call, seconds, hosts, tmp_path):
    """They meet by address; a host that ends, or a cable that is cut, is an error in time."""
    folder = tmp_path / "checkpoint"
    body = HOSTS.replace("1800", str(seconds))
    call = call.replace("FOLDER", repr(str(folder)))
    script = tmp_path / "rank.py"
    script.write_text(body.replace(CHECK, f"shard_models.{call}"))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    ranks = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                script,
                str(rank),
                f"{ADDRESSES[0]}:29511",
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, name in enumerate(hosts)
    ]
    try:
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(said)
    assert all("done" in text for text in said), "\n".join(said)
