"""Recompute policies, the choice among them, and activations that wait on the host."""

import contextlib
import copy
import itertools
import pickle
from fnmatch import fnmatch

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

pytest.importorskip("transformers")

import liger_multi
from benchmarks.harness import tracked_peak
from benchmarks.memory import Case
from liger_multi._torch_private import TorchDispatchMode, top_saved_tensor_hooks
from liger_multi.memory import (
    POLICIES,
    Policy,
    adapt,
    apply_recompute,
    choose,
    choose_within,
    compress_activations,
    decoder_layers,
    estimate,
    layer_stats,
    offload as codes,
    offload_activations,
    profile,
)
from liger_multi.memory.choosing import Cost, Stats
from liger_multi.memory.offload import Offload, _Plain
from liger_multi.memory.recompute import ATTENTION, keeps_result, store
from liger_multi.memory.recorder import SAVED
from liger_multi.ops import rms_norm

RECOMPUTING = [name for name in POLICIES if name != "none"]


def case(model_name="dense", patched=False, batch=2, sequence=32):
    return Case(model_name, batch, sequence, "float32", patched)


class Short(Case):
    """A model of two layers, for tests that look at every operator."""

    def config(self):
        config = super().config()
        config.num_hidden_layers = 2
        return config


def ids_of(model, batch=2, sequence=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, sequence), generator=generator)


def trained(model, seed=0, **options):
    """Loss and gradients of one step, with the same random numbers each time."""
    model.zero_grad()
    torch.manual_seed(seed)
    ids = ids_of(model)
    loss = model(input_ids=ids, labels=ids, **options).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def equal(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("policy", RECOMPUTING)
@pytest.mark.parametrize("model_name", ["gqa", "tied"])
def test_recomputed_results_bitwise_and_removed(model_name, policy):
    model = case(model_name).build("cpu")
    stock, forwards = trained(model), [m.__dict__.copy() for m in model.modules()]
    with apply_recompute(model, policy) as handle:
        assert set(handle.policies.values()) == {policy}
        assert equal(trained(model), stock)
        assert equal(trained(model), stock), "the second step leaves a product out"
    assert [m.__dict__.keys() for m in model.modules()] == [d.keys() for d in forwards]
    assert equal(trained(model), stock)


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_patched_as_under_the_models_own_checkpointing(policy):
    model = case("gqa", patched=True).build("cpu")
    loss = trained(model)[0]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = trained(model)
    model.gradient_checkpointing_disable()
    with apply_recompute(model, policy):
        assert equal(trained(model), expected)
    assert torch.equal(loss, expected[0])


@pytest.mark.parametrize("policy", ["norms_and_mlp", "keep_attention", "full"])
def test_dropout_is_drawn_again(policy):
    config = case().config()
    config.attention_dropout = 0.3
    model = type(case().build("cpu"))(config).train()
    for layer in model.model.layers:  # draws after those of attention
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.3))
    stock = trained(model)
    with apply_recompute(model, policy):
        assert equal(trained(model), stock)
        assert not equal(trained(model, seed=1), stock)


def test_a_call_that_draws_is_not_kept():
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.zeros(1, 1, 2, 4)
    policy = POLICIES["keep_attention"]
    assert keeps_result(policy, attend, (q, q, q), {})
    assert keeps_result(policy, attend, (q, q, q, 0.0), {})
    assert not keeps_result(policy, attend, (q, q, q, 0.1), {})
    assert not keeps_result(policy, attend, (q, q, q), {"dropout_p": 0.1})
    assert not keeps_result(Policy("all", "", ("*",)), torch.ops.aten.bernoulli.default, (q,), {})


class Block(nn.Module):
    """A layer of our operators and PyTorch's, small enough to compile quickly."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.rand(32))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        h = self.up(rms_norm(x, self.norm))
        return x + self.down(nn.functional.dropout(torch.nn.functional.silu(h), 0.3))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def graphs(policy):
    """Gradients of a compiled step, and how often its backward calls some operators."""
    targets = []

    def backward(graph, inputs):
        nodes = graph.graph.nodes
        targets.append([str(node.target) for node in nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    compiler = aot_autograd(
        fw_compiler=lambda graph, _: graph.forward,
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    model = Blocks()
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with apply_recompute(model, policy):
        torch.compile(model, backend=compiler, fullgraph=True)(x).backward()
    counts = [
        sum(name in target for target in targets[0]) for name in ("rms_norm_forward", "addmm")
    ]
    return counts, [p.grad.clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_compiles_to_one_graph():
    """The loss reads what the last layer makes; without gradients of it, nothing would."""
    plain, gradients = graphs("none")
    for policy, again in (("norms_and_mlp", [2, 0]), ("full", [2, 3])):
        counts, actual = graphs(policy)
        assert [a - b for a, b in zip(counts, plain, strict=True)] == again, policy
        for a, b in zip(actual, gradients, strict=True):
            assert a.shape == b.shape
            assert a.isfinite().all()


def products(model, policy):
    """GEMMs of a step's backward."""

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            inside = torch._C._current_autograd_node() is not None
            counts[inside] += func.name() in ("aten::mm", "aten::addmm")
            return func(*args, **(kwargs or {}))

    with apply_recompute(model, policy) if policy else contextlib.nullcontext():
        for _ in range(2):
            counts = [0, 0]
            with Count():
                trained(model)
    return counts


def test_what_is_computed_again():
    model = case().build("cpu")
    forward, plain = products(model, "none")
    assert plain == 2 * forward
    layers = len(model.model.layers)
    for policy, again in (("norms_and_mlp", 0), ("narrow", 2), ("keep_attention", 6), ("full", 6)):
        # nothing reads the last of a layer's seven GEMMs
        assert products(model, policy) == [forward, plain + again * layers], policy


@pytest.mark.parametrize("patched", [False, True])
def test_saved_bytes_by_policy(patched):
    saved = {}
    for policy in ("none", "norms", "norms_and_mlp", "full") if patched else POLICIES:
        one = Short("gqa", 4, 64, "float32", patched)
        model = one.build("cpu")
        apply_recompute(model, policy)
        optimizer, step = one.step(model)
        step()
        measured = profile(step, model=model, optimizer=optimizer)
        estimated = estimate(model, 4, 64, dtype="float32", optimizer="adamw_loop", device="cpu")
        assert estimated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.002)
        saved[policy] = measured.largest[SAVED]
        assert estimated.profile.largest[SAVED] == saved[policy]
    order = list(saved.values())
    if patched:  # its gated MLP is computed again as it is
        assert saved["norms"] == saved["norms_and_mlp"]
        order.remove(saved["norms"])
    assert all(a > b for a, b in itertools.pairwise(order)), saved


def test_last_gemm_kept_for_norm():
    """The first layer keeps all, as nothing is known yet; Gemma 2 has a norm after its MLP."""
    import transformers

    sizes = {**case().config().to_dict(), "num_hidden_layers": 2, "head_dim": 16}
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    names += ("hidden_size", "num_hidden_layers", "head_dim")
    config = transformers.Gemma2Config(**{n: sizes[n] for n in names})
    torch.manual_seed(0)
    config.use_cache = False
    gemma = transformers.Gemma2ForCausalLM(config).train()
    llama = case().build("cpu")
    for model in (gemma, llama):
        forward, backward = products(model, "norms_and_mlp")
        assert backward == 2 * forward
        handle = apply_recompute(model, "norms_and_mlp")
        trained(model)
        skips = {one.skip is None for one in handle._wrapped}
        assert skips == {model is gemma}


def test_layers_can_be_chosen():
    model = case().build("cpu")
    for layers, expected in ((2, [0, 1]), ([2], [2]), (None, [0, 1, 2])):
        with apply_recompute(model, "full", layers) as handle:
            assert [i for i, n in enumerate(handle.policies.values()) if n == "full"] == expected
    with apply_recompute(model, ["none", "norms", "full"]) as handle:
        assert list(handle.policies.values()) == ["none", "norms", "full"]
        assert str(handle) == "none: 1 layers, norms: 1 layers, full: 1 layers"
    with apply_recompute(model, {1: "full"}) as handle:
        assert list(handle.policies.values()) == ["none", "full", "none"]


def test_copies_have_their_own_layers():
    model = case().build("cpu")
    handle = apply_recompute(model, "full")
    other = copy.deepcopy(model)
    handle.remove()
    inside = other.model.layers[0].__dict__["forward"]
    assert inside.layer is other.model.layers[0]
    assert equal(trained(other), trained(model))


def test_a_saved_model_keeps_its_policy():
    model = case().build("cpu")
    apply_recompute(model, "keep_attention")
    other = pickle.loads(pickle.dumps(model))
    assert equal(trained(other), trained(model))
    assert products(other, None) == products(model, None) != products(case().build("cpu"), None)


def test_no_recomputation_without_gradients():
    model = case().build("cpu").eval()
    ids = ids_of(model)
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    with apply_recompute(model, "full"):
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)
        model.train()
        with pytest.warns(UserWarning, match="writes no cache"):
            trained(model, use_cache=True)


def test_recompute_refuses_second_recomputation():
    model = case().build("cpu")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="checkpointed by its model already"):
        apply_recompute(model, "full")
    model.gradient_checkpointing_disable()
    with apply_recompute(model, "full"):
        with pytest.raises(ValueError, match="has a recompute policy already"):
            apply_recompute(model, "norms")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with pytest.raises(RuntimeError, match="compute it twice"):
            trained(model)
        model.gradient_checkpointing_disable()
    handle = apply_recompute(model, "full")
    mine = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *a, **k: mine(*a, **k)
    with pytest.raises(RuntimeError, match=r"layers\.1 was replaced"):
        handle.remove()
    model.model.layers[1].forward = mine
    handle.remove()


FORMAT, NEGATIVE = "unknown format of activations 'int3'", "min_bytes must not be negative, got -1"
REFUSED = [
    (lambda model: apply_recompute(model, "norm"), "did you mean 'norms'"),
    (lambda model: apply_recompute(model, "full", 4), "layers are 0 to 2, got 3"),
    (lambda model: apply_recompute(model, "full", [-1]), "got -1"),
    (lambda model: apply_recompute(model, ["full"]), "a policy for each of 3 layers, got 1"),
    (lambda model: apply_recompute(model, {0: "full"}, 1), "goes with one policy"),
    (lambda model: offload_activations(model.lm_head), "no list of layers"),
    (lambda model: offload_activations(model, compress="int3"), FORMAT),
    (lambda model: compress_activations(model, "int3"), FORMAT),
    (lambda model: offload_activations(model, min_bytes=-1), NEGATIVE),
    (lambda model: compress_activations(model, min_bytes=-1), NEGATIVE),
    (lambda model: offload_activations(model).exposed_seconds(), "timed=True"),
]


@pytest.mark.parametrize(("request_of", "message"), REFUSED, ids=range(len(REFUSED)))
def test_bad_requests(request_of, message):
    with pytest.raises(ValueError, match=message):
        request_of(case().build("meta"))


def test_layers_are_found_by_structure():
    model = case("moe").build("meta")
    assert [path for path, _ in decoder_layers(model)] == [f"model.layers.{i}" for i in range(3)]
    experts = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="no list of layers"):
        apply_recompute(nn.Sequential(experts), "full")


def stats_of(*layers):
    return Stats(tuple({n: Cost(*c) for n, c in layer.items()} for layer in layers), 100)


LAYER = {"none": (100, 0.0), "norms": (70, 1.0), "keep_attention": (20, 3.0), "full": (10, 4.0)}


@pytest.mark.parametrize("budget", [1000, 400, 330, 250, 200, 180, 120, 100, 60])
def test_choice_near_optimum(budget):
    slow = {name: (kept_bytes, 3 * seconds) for name, (kept_bytes, seconds) in LAYER.items()}
    stats = stats_of(LAYER, LAYER, slow, LAYER)
    choice = choose(stats, budget)
    assert choice.kept_bytes == stats.kept_bytes(choice.policies)
    every = [p for p in itertools.product(LAYER, repeat=4) if stats.kept_bytes(p) <= budget]
    assert choice.fits == bool(every)
    if every:
        best = min(map(stats.seconds, every))
        step = 9.0 if budget < 400 else 0.0  # of the slow layer's most expensive policy
        assert best <= choice.seconds <= best + step
    else:
        assert set(choice.policies) == {"full"}


def test_statistics_of_a_model():
    model = case("gqa", True).build("cpu")
    stats = layer_stats(model, 4, 64, dtype="float32", device="cpu")
    assert stats.tokens == 256
    assert len(stats.layers) == 3
    kept_bytes = [stats.layers[0][name].kept_bytes for name in POLICIES]
    assert sorted(kept_bytes, reverse=True) == kept_bytes
    assert kept_bytes[-1] == 256 * 96 * 4, "the layer's input"
    seconds = [stats.layers[0][name].seconds for name in POLICIES]
    assert sorted(seconds) == seconds
    assert seconds[0] == 0
    handle = apply_recompute(model, "full")
    assert layer_stats(model, 4, 64, dtype="float32", device="cpu") == stats
    handle.remove()
    with pytest.raises(TypeError, match="batch beside statistics"):
        choose(stats, 1, batch=1)


def test_choice_within_a_peak():
    """In backward, gradients come where activations of the last layers have gone."""
    model = case("gqa", True).build("cpu")
    model.config.num_hidden_layers = 5
    config, sizes = model.config, (2, 32)
    options = {"dtype": "float32", "optimizer": "sgd", "device": "cpu"}
    limit = estimate(config, *sizes, **options, checkpointing=True).peak_bytes
    stats = layer_stats(config, *sizes, dtype="float32", device="cpu")

    def peak(policies):
        with torch.device("meta"):
            chosen = type(model)(config)
        apply_recompute(chosen, policies)
        return estimate(chosen, *sizes, **options).peak_bytes

    every = ("full",) * 5
    assert peak(every) == limit
    choice = choose_within(config, limit, *sizes, **options)
    assert choice.fits
    assert peak(choice.policies) <= limit
    assert choice.seconds == stats.seconds(choice.policies) < 0.7 * stats.seconds(every)
    assert choice.kept_bytes == stats.kept_bytes(choice.policies) > stats.kept_bytes(every)
    assert choice.policies[-1] == "none" != choice.policies[0], "what the first keeps lives longest"
    own = type(model)(config)
    handle = apply_recompute(own, "full")
    assert set(choose_within(own, 10**12, *sizes, **options).policies) == {"none"}
    assert set(handle.policies.values()) == {"full"}
    handle.remove()
    own.gradient_checkpointing_enable()
    least = choose_within(own, 1, *sizes, **options)
    assert (least.policies, least.fits) == (every, False)
    assert all(layer.gradient_checkpointing for layer in own.model.layers)
    with pytest.raises(ValueError, match="got checkpointing=True"):
        choose_within(config, limit, *sizes, checkpointing=True)
    with pytest.raises(ValueError, match="batch must be a positive integer, got 0"):
        choose_within(config, limit, 0, 32)
    with pytest.raises(ValueError, match="peak_bytes must be a positive integer, got '5GiB'"):
        choose_within(config, "5GiB", 1, 32)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_simulates_training_has_gradients(mode):
    model = case().build("cpu")
    options = {"dtype": "float32", "device": "cpu"}
    limit = estimate(model, 1, 8, **options).peak_bytes
    stats = layer_stats(model, 1, 8, **options)
    with mode():
        assert estimate(model, 1, 8, **options).peak_bytes == limit
        assert layer_stats(model, 1, 8, **options) == stats
        assert choose_within(model, limit, 1, 8, **options).fits
        assert torch.is_grad_enabled() is False


def test_a_step_needs_the_peak_that_it_was_chosen_for():
    """Measured from live storages: no more than the checkpointing of all layers, for less work."""
    model = case("gqa", True).build("cpu")
    config = model.config
    config.num_hidden_layers = 9
    torch.manual_seed(0)
    model = type(model)(config).train()
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)
    ids = ids_of(model)

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def measured(policies):
        with apply_recompute(model, policies):
            step()
            return tracked_peak(model, optimizer, step)

    full, none = measured("full"), measured("none")
    options = {"dtype": "float32", "optimizer": "sgd", "device": "cpu"}
    limit = estimate(config, 2, 32, **options, checkpointing=True).peak_bytes
    choice = choose_within(config, limit, 2, 32, **options)
    assert measured(choice.policies) <= 1.01 * full < none


def test_adapt_to_free_memory():
    model = case().build("cpu")
    stats = layer_stats(model, 2, 32, dtype="float32", device="cpu")
    stock = trained(model)
    free = [10**9]
    asked = []

    def probe():
        asked.append(free[0])
        return free[0]

    handle = adapt(model, stats, reserve_bytes=1000, probe=probe)
    choices = {}
    for free[0] in (10**9, 0, 10**9, stats.kept_bytes(("none", "full", "full")) + 1000):
        assert equal(trained(model), stock)
        choices.setdefault(free[0], handle.choice.policies)
        assert choices[free[0]] == handle.choice.policies, "the same room, the same choice"
        assert tuple(handle.policies.values()) == handle.choice.policies
    assert set(choices[10**9]) == {"none"}
    assert set(choices[0]) == {"full"}
    assert len(set(choices.values())) == 3
    calls = len(asked)
    with torch.no_grad():
        model(input_ids=ids_of(model))
    assert len(asked) == calls
    free[0] = stats.kept_bytes(("none",) * 3) + 1000
    ids = ids_of(model, 4)
    model(input_ids=ids, labels=ids)
    assert set(handle.choice.policies) != {"none"}, "twice the tokens"
    handle.remove()
    assert equal(trained(model), stock)
    with pytest.raises(ValueError, match="give a probe"):
        adapt(model, stats)
    with pytest.raises(ValueError, match="statistics of 1 layers, the model has 3"):
        adapt(model, stats_of(LAYER), probe=lambda: 0)
    assert "forward" not in model.model.layers[0].__dict__


@pytest.mark.parametrize(
    ("patched", "policy"),
    [
        (True, "none"),
        (False, "narrow"),
        (True, "norms_and_mlp"),
        (True, "keep_attention"),
        (False, "keep_attention"),
        (True, "full"),
    ],
)
def test_offloaded_to_the_bit(patched, policy):
    model = case("gqa", patched).build("cpu")
    with apply_recompute(model, policy):
        here = trained(model)
        with offload_activations(model, min_bytes=512) as handle:
            assert equal(trained(model), here)
            sent = handle.offloaded_bytes
        assert equal(trained(model), here)
        assert sent > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_interrupted_offload_sets_nothing(error):
    """Whatever ends forward, nothing that is saved later goes through its hooks."""

    def stop(*_):
        raise error

    model = case("gqa").build("cpu")
    with offload_activations(model, min_bytes=0) as handle:
        hook = decoder_layers(model)[1][1].register_forward_hook(stop)
        with pytest.raises(error):
            model(input_ids=ids_of(model))
        hook.remove()
        assert top_saved_tensor_hooks(True) is None
        assert store.get() is None
        liger_multi.patch(model)  # the stack's forward is not somebody else's
        copied = copy.deepcopy(model)
        assert equal(trained(copied), trained(model))
        other = offload_activations(model, min_bytes=0)
    assert handle.offloaded_bytes > 0
    other.remove()
    assert trained(model) is not None


def test_what_is_offloaded():
    """Each piece of memory once; no parameters, small tensors or tensors with gaps."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.a(x) + self.b(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block()])

        def forward(self, x, gate):
            return (self.blocks[0](x) * gate).exp()

    model, x = Model(), torch.randn(32, 64, requires_grad=True)
    gate = torch.rand(1, 64).expand(32, 64)
    with offload_activations(model, min_bytes=1024) as handle:
        model(x, gate).sum().backward()
        first = x.grad.clone()
        # the shared input, the product of the gate's other factor is needed by nobody, the result
        assert handle.offloaded_bytes == 2 * 32 * 64 * 4
        assert handle.kept_bytes >= 2 * 64 * 64 * 4
        with torch.no_grad():
            model(x, gate)
    x.grad = None
    model(x, gate).sum().backward()
    assert torch.equal(x.grad, first)


def test_changed_in_place_between_two_uses():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Bilinear(4, 4, 4)])
            self.blocks[0].extra = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            y = x.detach().clone()
            first = x * y
            y.add_(1.0)
            return first + x * y

    x = torch.randn(4, 4, requires_grad=True)
    model = Model()
    model.blocks[0].weight2 = nn.Parameter(torch.ones(2, 2))
    with offload_activations(model, min_bytes=1):
        model(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() + 1)


def test_offload_estimate():
    """On an accelerator tensors in flight stay; all others leave."""
    peaks = {}
    for in_flight_bytes in (None, 10**9, 0):
        model = Short("gqa", 4, 64, "float32").build("meta")
        handle = (
            None
            if in_flight_bytes is None
            else offload_activations(model, min_bytes=1024, in_flight_bytes=in_flight_bytes)
        )
        estimated = estimate(model, 4, 64, dtype="float32", optimizer="none")
        peaks[in_flight_bytes] = estimated.profile.largest[SAVED]
        assert handle is None or handle.offloaded_bytes == 0, "of the copy"
    assert peaks[0] < 0.4 * peaks[10**9]
    assert peaks[10**9] <= peaks[None] * 1.01


class Attends(TorchDispatchMode):
    """Counts calls of attention."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func.name()).partition(".")[0]
        self.calls += "backward" not in name and any(fnmatch(name, p) for p in ATTENTION)
        return func(*args, **(kwargs or {}))


def test_offloaded_attention_is_not_computed_again():
    """Its result and log-sum-exp go to the host; a layer has one backward then."""
    model, sent = case("gqa", patched=True).build("cpu"), {}
    ids, config = ids_of(model), model.config
    for policy, again in (("full", 1), ("keep_attention", 0)):
        with (
            apply_recompute(model, policy),
            offload_activations(model, min_bytes=1) as handle,
            Attends() as counts,
        ):
            loss = model(input_ids=ids, labels=ids).loss
            forward, sent[policy] = counts.calls, handle.offloaded_bytes
            loss.backward(retain_graph=True)
            assert (forward, counts.calls - forward) == (3, 3 * again)
            if not again:
                with pytest.raises(RuntimeError, match="has one backward"):
                    loss.backward()
    width = config.num_attention_heads * (config.hidden_size // config.num_attention_heads + 1)
    assert sent["keep_attention"] - sent["full"] == 3 * ids.numel() * 4 * width


QUERY_ERROR, GRADIENT_ERROR = 0.12, 0.05
"""Of the norm of a tensor, in FP8: of projections before the softmax, whose gradients are
differences of nearly equal numbers in this model of random weights, and of all others."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_compressed_gradients(dtype, checkpointing):
    """The loss is that without; gradients differ by rounding, on the device as on the host."""
    model = case("gqa", patched=True).build("cpu").to(dtype)
    handle = None if checkpointing else apply_recompute(model, "keep_attention")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    exact, sent = trained(model), {}
    with offload_activations(model, min_bytes=512) as plain:
        trained(model)
        sent["plain"] = plain.offloaded_bytes
    with offload_activations(model, min_bytes=512, compress="float8") as one:
        rounded = trained(model)
        sent["float8"] = one.offloaded_bytes
    with compress_activations(model, min_bytes=512):
        assert equal(trained(model), rounded)
    assert equal(trained(model), exact)
    assert torch.equal(rounded[0], exact[0])
    assert sent["float8"] < (0.7 if dtype == torch.float32 else 0.85) * sent["plain"]
    errors = {}
    for (name, _), a, b in zip(model.named_parameters(), rounded[1:], exact[1:], strict=True):
        errors[name] = float((a - b).float().norm() / b.float().norm())
        limit = QUERY_ERROR if "q_proj" in name or "k_proj" in name else GRADIENT_ERROR
        assert errors[name] < limit, name
    assert max(errors.values()) > 1e-3
    assert errors["lm_head.weight"] == errors["model.norm.weight"] == 0
    assert handle is None or set(handle.policies.values()) == {"keep_attention"}


def test_codes_of_rows():
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(5, 48, generator=generator)
        * torch.tensor([1e-30, 1e-3, 1.0, 1e4, 0.0])[:, None]
    )
    for tensor in (x, x.bfloat16(), x.double(), x.T):
        assert codes.compressible(tensor)
        flat = tensor.as_strided((tensor.numel(),), (1,))
        again = codes.decode(*codes.encode(flat, codes.row_length(tensor)), flat.dtype)
        rows, actual = flat.view(5, 48), again.view(5, 48)
        limit = rows.abs() / 16 + rows.abs().amax(1, keepdim=True) * 2**-18
        assert bool(((actual - rows).abs() <= limit).all())
        assert torch.equal(rows.abs().amax(1) > 0, actual.abs().amax(1) > 0)
    assert not codes.compressible(torch.zeros(64, 8))
    assert not codes.compressible(torch.zeros(8, 64, dtype=torch.int64))
    assert not bool(codes.decode(*codes.encode(x.flatten() / 0, 48), x.dtype).isfinite().any())


@pytest.mark.parametrize("shape", [(0, 4, 32), (0, 32)], ids=str)
def test_codes_of_no_rows(shape):
    x = torch.empty(shape)
    assert codes.decode(*codes.encode(x.flatten(), 32), x.dtype).shape == (0,)


class Overwriting(nn.Module):
    """Writes to what is kept: a tensor that autograd saved, or else a GEMM's result."""

    def __init__(self, saved):
        super().__init__()
        self.up, self.down, self.saved = nn.Linear(32, 32), nn.Linear(32, 32), saved

    def forward(self, x):
        hidden = self.up(x)
        hidden = torch.tanh(hidden if self.saved else hidden.mul_(2))
        y = self.down(hidden)
        if self.saved:
            hidden.detach().add_(1)
        return y


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("keep", [offload_activations, compress_activations])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_writes_to_kept_tensors_raise(keep, saved, asynchronous, monkeypatch):
    """As without hooks: PyTorch does not compare versions of what hooks have packed."""
    model = nn.Sequential(nn.ModuleList(Overwriting(saved) for _ in range(2)))
    model.forward = lambda x: model[0][1](model[0][0](x))
    monkeypatch.setattr(_Plain, "asynchronous", asynchronous)
    if asynchronous:  # the copy is late
        monkeypatch.setattr(_Plain, "out", lambda self, parked, source: None)
    min_bytes = 0 if asynchronous else 2**20
    with (
        contextlib.nullcontext() if saved else apply_recompute(model, "norms_and_mlp"),
        keep(model, min_bytes=min_bytes),
    ):
        loss = model(torch.randn(4, 32)).sum()
        with pytest.raises(RuntimeError, match=r"shape \(4, 32\) .* written to in place"):
            loss.backward()


def test_fetched_a_layer_ahead(monkeypatch):
    """Nothing is fetched when it is needed: a layer's kept results come with its input."""
    order = []

    class Later(_Plain):
        asynchronous = True

        def out(self, parked, source):
            parked.host = source

        def back(self, parked):
            order.append(("fetch", parked.number))
            return parked.host

        def wait(self, parked):
            order.append(("left" if parked.fetched is None else "need", parked.number))

    monkeypatch.setattr(Offload, "_how", lambda self, module: Later())
    model = case("gqa", patched=True).build("cpu")
    layer_bytes = 2 * 32 * 64 * 4 * 2 + 2 * 32 * 4 * 4  # input, attention, log-sum-exp
    with apply_recompute(model, "keep_attention"):
        here = trained(model)
        with offload_activations(model, min_bytes=512, in_flight_bytes=layer_bytes):
            assert equal(trained(model), here)
    fetched = [number for what, number in order if what == "fetch"]
    assert len(fetched) == len(set(fetched)) >= 7
    for number in fetched:
        if ("need", number) in order:
            assert order.index(("need", number)) > order.index(("fetch", number)) + 1


def test_patched_before_or_after():
    model = case("dense").build("cpu")
    with apply_recompute(model, "norms"):
        liger_multi.patch(model)
        gradients = trained(model)
    model = case("dense", True).build("cpu")
    with apply_recompute(model, "norms"):
        assert equal(trained(model), gradients)


@pytest.mark.parametrize("limit", [300, 5000, 100_000, 130_000])
@pytest.mark.parametrize("start", [100, 20_000, 128_000])
def test_the_search_for_the_longest_sequence(limit, start):
    from benchmarks.recompute import LENGTH_STEP, search

    tries = list(search(lambda n: n <= limit, start, 0.02, lambda: 1.0))
    longest = max((n for n, good in tries if good), default=0)
    failed = min(n for n, good in tries if not good)
    assert all(good == (n <= limit) and n % LENGTH_STEP == 0 for n, good in tries)
    assert longest <= limit < failed
    assert failed - longest <= max(LENGTH_STEP, 0.02 * failed)
    assert len(tries) == len({n for n, _ in tries}) <= 24
    assert not list(search(lambda n: True, start, 0.02, lambda: 0.0)), "no time, no try"


FP8_LAYERS = [("norms_and_mlp", True, True), ("narrow", False, True), ("full", False, False)]


@pytest.mark.parametrize(("policy", "widening", "narrowing"), FP8_LAYERS)
def test_float8_layers_count_as_gemms(policy, widening, narrowing):
    """The first axis of a weight is that of the output, unlike in PyTorch's GEMMs."""
    op = torch.ops.liger_multi.linear_float8_forward.default
    x = torch.empty(4, 32, device="meta")
    for out, is_kept in ((64, widening), (16, narrowing)):
        args = (x, torch.empty(out, 32, device="meta"), None)
        assert keeps_result(POLICIES[policy], op, args, {}) == is_kept


@pytest.mark.parametrize("policy", ["norms_and_mlp", "narrow", "full"])
def test_a_model_in_float8_computes_the_same_again(policy):
    gradients = []
    for again in (None, policy):
        model = Case("dense", 2, 16, "float32").build("cpu").train()
        liger_multi.patch(model, linear_float8={"smallest": 0})
        if again is not None:
            apply_recompute(model, again)
        ids = torch.arange(32).view(2, 16)
        for _ in range(2):  # from the second step on, norms return FP8 codes
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
