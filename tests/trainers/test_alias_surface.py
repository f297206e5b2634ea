"""Every public name of liger-kernel is served with its signature, or skipped for a reason."""

import ast
import importlib
import importlib.util
import inspect
from fnmatch import fnmatchcase

import pytest
import yaml

from ci.alias_surface import NAME, TARGET, differences, flat, surface
from liger_multi.compat import liger_kernel as alias
from liger_multi.compat.liger_kernel import finder

RECORDED = yaml.safe_load(TARGET.read_text(encoding="utf-8"))
NAMES = flat(RECORDED["modules"])
if not importlib.util.find_spec("trl"):  # one trainer derives from a class of TRL
    NAMES = {n: kind for n, kind in NAMES.items() if not n.endswith(".LigerORPOTrainer")}

VENDORS = "kernels of one vendor; backends are chosen by liger_multi.configure"
HALVES = "forward and backward of operators are no functions of their own here"
KERNELS = "settings and parts of kernels; launch tables stand beside ours"
SKIPPED = {
    "ops.cute*": VENDORS,
    "ops.cutile*": VENDORS,
    "ops.*_forward": HALVES,
    "ops.*_backward": HALVES,
    "ops.*_fwd": HALVES,
    "ops.*_bwd": HALVES,
    "ops.*_triton": HALVES,
    "ops.cross_entropy.LOG2_E": KERNELS,
    "ops.mlp.*": KERNELS,
    "ops.*.MAX_FUSED_SIZE": KERNELS,
    "ops.*.REDUCTION_LITERAL": KERNELS,
    "ops.*.get_num_warps": KERNELS,
    "ops.fused_moe*": KERNELS,
    "ops.experimental.mm_int8int2*": "a matrix product of 8 and 2 bits, which no operator uses",
    "transformers.moe*": "needs liger_cute_kernels",
    "transformers.model.output_classes*": "derives from a class that this transformers lacks",
    "triton.monkey_patch.LigerTritonFileCacheManager": "Triton's own cache is used",
    "testing*": "test helpers of the package itself",
}
"""Patterns of names below the package that are not served, with the reason."""

KERNEL_THERE = "on for every model type: what Liger-Kernel has no kernel for, ours has"
OTHERWISE = {
    "transformers.model.output_classes*": "fields of a class of transformers come first",
    "transformers.*apply_liger_kernel_to_deepseek_v[234]": KERNEL_THERE,
    "transformers.*apply_liger_kernel_to_gemma4*": KERNEL_THERE,
    "transformers.*apply_liger_kernel_to_glm4*": KERNEL_THERE,
    "transformers.*apply_liger_kernel_to_gpt_oss": KERNEL_THERE,
    "transformers.*apply_liger_kernel_to_granite": KERNEL_THERE,
    "transformers.*apply_liger_kernel_to_qwen3_5*": KERNEL_THERE,
    "transformers.*apply_liger_kernel_to_qwen3_next": KERNEL_THERE,
    "transformers.*apply_liger_kernel_to_qwen3_vl": KERNEL_THERE,
}
"""Patterns of names whose signature differs on purpose, with the reason."""


@pytest.fixture(scope="module")
def installed():
    if importlib.util.find_spec(NAME):
        pytest.skip("the real package is installed")
    alias.install()
    yield
    alias.uninstall()


def served(name):
    """What stands under a dotted name; None where nothing does."""
    for module, rest in ((name, ""), name.rpartition(".")[::2]):
        try:
            made = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        found = getattr(made, rest, None) if rest else made
        if found is not None:
            return found
    return None


def matching(name, table):
    return [p for p in table if fnmatchcase(name.removeprefix(f"{NAME}."), p)]


def test_every_name_is_served_or_skipped_for_a_reason(installed):
    lost = [n for n, kind in NAMES.items() if kind != "kernel" and served(n) is None]
    assert [n for n in lost if not matching(n, SKIPPED)] == []
    used = {p for n in lost for p in matching(n, SKIPPED)}
    assert set(SKIPPED) - used == set()


# --- signatures ---


def parameters(text):
    """A recorded signature as a list of names and of defaults that can be compared."""
    made = ast.parse(f"def f{text}: pass").body[0].args
    plain = [*made.posonlyargs, *made.args]
    defaults = [*[inspect.Parameter.empty] * (len(plain) - len(made.defaults)), *made.defaults]
    named = [*zip(plain, defaults), *zip(made.kwonlyargs, made.kw_defaults)]
    return [(a.arg, value(d)) for a, d in named], len(plain)


def value(node):
    """A default; ``...`` where it is no literal."""
    if node is None or node is inspect.Parameter.empty:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ...


def differs(call, text, skip=0):
    """How a function cannot be called as the recorded one; None where it can."""
    wanted, positional = parameters(text)
    try:
        every = list(inspect.signature(call).parameters.values())[skip:]
    except ValueError:  # Function.apply is a builtin from PyTorch 2.14 on: forward has the names
        return None
    ours = [p for p in every if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    several = {p.kind for p in every} - {p.kind for p in ours}
    for i, (name, default) in enumerate(wanted):
        mine = ours[i] if i < len(ours) else None
        if mine is None or mine.name != name:
            by_name = next((p for p in ours if p.name == name), None)
            if i >= positional and by_name is not None:
                mine = by_name
            elif inspect.Parameter.VAR_KEYWORD in several and len(several) == 2:
                continue
            else:
                return f"{name} is {mine and mine.name}"
        if i < positional and mine.kind is inspect.Parameter.KEYWORD_ONLY:
            return f"{name} has no position"
        if default not in (..., mine.empty) and mine.default != default:
            return f"{name}={mine.default!r}, not {default!r}"
    more = [p.name for p in ours if p.default is p.empty and p.name not in dict(wanted)]
    return f"needs {more}" if more else None


def calls(found, entry):
    """The callables of a name, with what is recorded of each."""
    if isinstance(entry, str):
        return [(found, entry, 0)] if entry.startswith("(") else []
    made = {"init": (found, 0), "apply": (getattr(found, "apply", None), 0)}
    made["forward"] = (getattr(found, "forward", None), 1)
    return [(made[kind][0], text, made[kind][1]) for kind, text in entry.items()]


def wrong_signatures():
    found = {}
    for name, entry in NAMES.items():
        made = served(name)
        if made is not None:
            for call, text, skip in calls(made, entry):
                reason = differs(call, text, skip)
                if reason is not None:
                    found[name] = reason
    return found


def test_signatures_are_those_of_the_package(installed):
    wrong = wrong_signatures()
    assert {n: why for n, why in wrong.items() if not matching(n, OTHERWISE)} == {}
    assert set(OTHERWISE) - {p for n in wrong for p in matching(n, OTHERWISE)} == set()


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (lambda x, y=1: None, None),
        (lambda x, y=1, z=3: None, None),
        (lambda *args, **kwargs: None, None),
        (lambda x: None, "y is None"),
        (lambda y, x=1: None, "x is y"),
        (lambda x, y=2: None, "y=2, not 1"),
        (lambda x, *, y=1: None, "y has no position"),
        (lambda x, y=1, *, z: None, "needs ['z']"),
    ],
)
def test_what_counts_as_the_same_signature(ours, said):
    assert differs(ours, "(x, y=1)") == said


# --- the recording ---


def test_names_are_read_without_importing(tmp_path):
    import zipfile

    wheel = tmp_path / "liger_kernel-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("liger_kernel/__init__.py", "from liger_kernel.a import Big\nraise 1\n")
        archive.writestr("liger_kernel/_b.py", "x = 1\n")
        archive.writestr(
            "liger_kernel/a.py",
            "SIZE = 4\n_hidden = 1\n"
            "class Base(autograd.Function):\n    def forward(ctx, x, n=SIZE): ...\n"
            "class Big(Base): ...\n"
            "if True:\n    @dataclass\n    class D:\n        x: int\n        y: int = 2\n"
            "@triton.jit\ndef k(): ...\n"
            "class M:\n    def __init__(self, a, *, b=None): ...\n    def forward(self, x): ...\n",
        )
    found = surface(wheel)
    assert found == {
        "liger_kernel": {"Big": {"apply": "(x, n=4)"}},
        "liger_kernel.a": {
            "Base": {"apply": "(x, n=4)"}, "Big": {"apply": "(x, n=4)"},
            "D": {"init": "(x, y=2)"}, "M": {"init": "(a, *, b=None)", "forward": "(x)"},
            "SIZE": "value", "k": "kernel",
        },
    }  # fmt: skip
    newer = {"liger_kernel.a": {**found["liger_kernel.a"], "SIZE": "()", "more": "(x)"}}
    assert differences(found, newer) == [
        "+ liger_kernel.a.more: (x)",
        "- liger_kernel",
        "- liger_kernel.Big",
        "! liger_kernel.a.SIZE: value -> ()",
    ]


def test_the_recording_is_of_the_version_that_is_stood_in_for():
    assert finder.VERSION.split("+")[0] == RECORDED["version"]
