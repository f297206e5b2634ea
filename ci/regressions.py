"""Defects that users of other libraries reported, the tests that hold them, and their proof.

``python -m ci.regressions [NUMBER ...]`` takes each fix out of a copy of the sources and runs its
tests there: they must fail. A change that moves a fix makes its entry here stale, which the run
says. The page of regressions is made of this table.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = (
    "liger_multi", "backends", "reference", "tests", "benchmarks", "ci",
    "pyproject.toml", "Makefile",
)  # fmt: skip
ECOSYSTEM = "tests/patching/test_patching_ecosystem.py"
REPOSITORIES = {
    "LK": "linkedin/Liger-Kernel",
    "CCE": "apple/ml-cross-entropy",
    "US": "unslothai/unsloth",
    "HK": "huggingface/kernels",
    "TRL": "huggingface/trl",
    "fla": "fla-org/flash-linear-attention",
}


@dataclass(frozen=True)
class Break:
    """A fix that is taken out.

    Attributes:
        what: What is done, in words.
        file: Where.
        old: Text that stands there once.
        new: What stands there instead.
        tests: Arguments of pytest: tests, perhaps narrowed by ``-k``.
        environment: Variables of the run.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The tests as ``file::function``."""
        return [t for t in self.tests if "::" in t]


@dataclass(frozen=True)
class Case:
    """One reported defect: its number in the project's list, what happened, and where."""

    number: int
    title: str
    threads: str
    breaks: tuple[Break, ...]


CASES = (
    Case(
        1,
        "a compiled loss is silently wrong with ignored targets",
        "LK #1338",
        (
            Break(
                "the call in the graph drops `ignore_index`",
                "liger_multi/dispatch/op.py",
                "return self.torch_op(*args, traced, source_hash())",
                "args = tuple(0 if type(a) is int and a == -100 else a for a in args)\n"
                "            return self.torch_op(*args, traced, source_hash())",
                ("tests/ops/test_contracts.py::test_compiled_equals_eager_with_ignored_targets",),
            ),
        ),
    ),
    Case(
        2,
        '`reduction="none"` scales every gradient by the first upstream gradient',
        "LK #968, LK #1298",
        (
            Break(
                "the fused loss scales all rows by the first row's gradient",
                "reference/cross_entropy/fused_linear_cross_entropy.py",
                "dloss[where].contiguous()",
                "dloss[:1].expand(len(t)).contiguous()",
                (
                    "tests/ops/test_ops.py::test_forward_and_backward",
                    "-k",
                    "fused_linear_cross_entropy-reference and none and float32",
                ),
            ),
            Break(
                "`cross_entropy` does the same",
                "reference/cross_entropy/reduction.py",
                'return (dloss, dloss) if reduction == "none"',
                'return (dloss[:1].sum(), dloss[:1].sum()) if reduction == "none"',
                (
                    "tests/ops/test_ops.py::test_forward_and_backward",
                    "-k",
                    "cross_entropy-reference-none and float32 and not fused",
                ),
            ),
        ),
    ),
    Case(
        3,
        "logits that another operator saved are overwritten by their gradient",
        "LK #272, LK #343, LK #1251",
        (
            Break(
                "the gradient is written over the logits",
                "reference/cross_entropy/cross_entropy.py",
                "dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)",
                "dlogits = logits",
                (
                    "tests/dispatch/test_dispatch.py::test_softmax_then_cross_entropy_keeps_its_gradient",
                ),
            ),
            Break(
                "`inplace=True` does not advance autograd's version counter",
                "liger_multi/dispatch/codegen.py",
                '        f"_increment_version({op.inplace})" if op.inplace else None,\n',
                "",
                (
                    "tests/ops/test_triton_calls.py::test_what_was_overwritten_raises_for_whoever_saved_it",
                    "--backend",
                    "triton",
                ),
                {"TRITON_INTERPRET": "1"},
            ),
        ),
    ),
    Case(
        4,
        "gradient accumulation does not equal one batch",
        "LK #322, LK #802",
        (
            Break(
                "a patched model's sum over tokens becomes a mean",
                "liger_multi/patching/head/loss.py",
                '"reduction": self.reduction,',
                '"reduction": self.reduction.replace("sum", "mean"),',
                (
                    "tests/patching/test_patching.py::test_accumulation_over_uneven_batches_equals_one_batch",
                    f"{ECOSYSTEM}::test_trainer_accumulation_equals_one_batch_with_uneven_lengths",
                ),
            ),
        ),
    ),
    Case(
        5,
        "the size of a chunk changes the gradients",
        "LK #512, LK #1472",
        (
            Break(
                "the weight's gradient accumulates in the dtype of the inputs",
                "reference/common/chunking.py",
                "return kind if once or kind == torch.float64 else accumulate",
                "return kind",
                ("tests/ops/test_numerics.py::test_no_result_depends_on_the_chunk",),
            ),
        ),
    ),
    Case(
        6,
        "a batch whose targets are all ignored divides by zero or leaves the graph",
        "LK #177",
        (
            Break(
                "the divisor is not compared with zero",
                "reference/cross_entropy/reduction.py",
                "return torch.where(by == 0, 0, value / by)",
                "return value / by",
                (
                    "tests/patching/test_patching.py::test_all_targets_ignored_is_zero_and_connected",
                ),
            ),
        ),
    ),
    Case(
        7,
        "a head that ZeRO-3 has partitioned fails with an unrelated error",
        "LK #767, LK #1353",
        (
            Break(
                "the patched head does not check that its weight has elements",
                "liger_multi/patching/head/module.py",
                "if weight.numel() == 0:",
                "if False:",
                (
                    "tests/tools/test_regressions.py::test_a_head_without_elements_is_named",
                    "tests/patching/test_patching_logits.py::test_a_partitioned_weight_names_zero3",
                ),
            ),
            Break(
                "the operator does not check it",
                "liger_multi/ops/_head.py",
                "if weight.numel() == 0:",
                "if False:",
                ("tests/ops/test_numerics.py::test_bad_input_is_named",),
            ),
            Break(
                "the loss reads the weight instead of calling the head, whose hooks gather it",
                "liger_multi/patching/head/deferred.py",
                'return getattr(self.head, "asked", self.head)(hidden, job)',
                "return job.run(self.head, hidden)",
                (
                    "tests/tools/test_regressions.py::test_a_partitioned_head_is_gathered_for_the_loss",
                ),
            ),
        ),
    ),
    Case(
        8,
        "an adapter on the head silently gets no gradient",
        "TRL #4612",
        (
            Break(
                "the fused loss uses the base layer instead of the adapter",
                "liger_multi/patching/head/find.py",
                "    return [head]\n",
                '    base = getattr(head, "base_layer", None)\n'
                "    if base is not None:\n"
                "        head.forward = base.forward\n"
                "        return [base]\n"
                "    return [head]\n",
                (f"{ECOSYSTEM}::test_lora_on_the_head_is_trained",),
            ),
        ),
    ),
    Case(
        9,
        "a frozen head still allocates a gradient of its own size",
        "fla #1253",
        (
            Break(
                "every tensor is treated as requiring a gradient",
                "liger_multi/dispatch/codegen.py",
                "{optional}{name}.requires_grad",
                "{name} is not None",
                (
                    "tests/dispatch/test_dispatch.py::test_frozen_weights_allocate_no_gradient",
                    "tests/patching/test_patching.py::test_frozen_head_allocates_no_weight_gradient",
                ),
            ),
        ),
    ),
    Case(
        10,
        "evaluation materializes all logits",
        "LK #703",
        (
            Break(
                "logits are lazy only while gradients are recorded",
                "liger_multi/patching/head/module.py",
                "if not grad and (hidden.ndim < 3",
                "if not grad or (hidden.ndim < 3",
                (
                    "tests/patching/test_patching.py::test_evaluation_allocates_no_gradients_and_no_logits",
                ),
            ),
        ),
    ),
    Case(
        11,
        "`unpatch` does not restore the original objects",
        "LK #636, LK #385",
        (
            Break(
                "an equal copy of the original class is restored",
                "liger_multi/patching/swap.py",
                "module.__class__ = found.stock",
                "module.__class__ = type(found.stock.__name__, (found.stock,), {})",
                ("tests/patching/test_patching_api.py::test_unpatch_brings_the_very_same_back",),
            ),
        ),
    ),
    Case(
        12,
        "importing requires Triton or a device",
        "US #5226, US #5008",
        (
            Break(
                "the package imports Triton",
                "liger_multi/__init__.py",
                "from liger_multi import ops\n",
                "import triton\n\nfrom liger_multi import ops\n",
                (
                    "tests/dispatch/test_import.py::test_importing_loads_nothing_optional_and_touches_no_driver",
                    "tests/dispatch/test_import.py::test_every_operator_runs_with_optional_packages_hidden",
                ),
            ),
            Break(
                "the package asks for the current device on a machine without one",
                "liger_multi/__init__.py",
                "from liger_multi import ops\n",
                "import os\n\nimport torch\n\n"
                'if os.environ.get("CUDA_VISIBLE_DEVICES") == "":\n'
                "    torch.cuda.current_device()\n"
                "from liger_multi import ops\n",
                (
                    "tests/dispatch/test_import.py::test_the_first_calls_without_a_device_load_nothing_optional",
                ),
            ),
        ),
    ),
    Case(
        13,
        "32 warps of 64 lanes are launched, more threads than a device has",
        "LK #231, LK #266",
        (
            Break(
                "the warps are not limited by the threads of the device",
                "liger_multi/dispatch/launch.py",
                "if warps is not None and warps * info.warp_size > info.max_threads:",
                "if False:",
                ("tests/ops/test_numerics.py::test_no_launch_exceeds_the_threads_of_a_device",),
            ),
        ),
    ),
    Case(
        14,
        "tensors of another device are read on the current device",
        "LK #401, LK #1303",
        (
            Break(
                "the device of the tensors is not made the current one",
                "liger_multi/dispatch/torch_ops.py",
                "if module is None or module.current_device() == device.index:",
                "if True:",
                ("tests/ops/test_numerics.py::test_operators_run_on_the_device_of_their_tensors",),
            ),
        ),
    ),
    Case(
        15,
        "more than 65 535 rows, or vocabularies beyond 65 536, fail",
        "LK #1294, US #7",
        (
            Break(
                "the reference takes at most 65 535 rows",
                "reference/common/chunking.py",
                "yield slice(start, min(rows, start + step))",
                "yield slice(start, min(rows, start + step, 65535))",
                (
                    "tests/tools/test_regressions.py::test_many_rows_and_classes_in_the_fused_loss",
                    "tests/ops/test_ops.py::test_forward_and_backward",
                    "-k",
                    "(reference and past-65535-rows) or many_rows",
                ),
            ),
            Break(
                "a kernel iterates over the first 65 536 classes",
                "backends/triton/cross_entropy/cross_entropy.py",
                "    target = tl.load(target_ptr + row * target_stride)\n"
                "    if target == ignore_index:\n",
                "    target = tl.load(target_ptr + row * target_stride)\n"
                "    cols = tl.minimum(cols, 65536)\n"
                "    if target == ignore_index:\n",
                (
                    "tests/ops/test_ops.py::test_forward_and_backward",
                    "-k",
                    "cross_entropy and large-vocabulary",
                    "--backend",
                    "triton",
                ),
                {"TRITON_INTERPRET": "1"},
            ),
        ),
    ),
    Case(
        16,
        "an option of the loss is ignored in combination with others",
        "CCE #48, CCE #52",
        (
            Break(
                "the gradient ignores the softcap",
                "reference/cross_entropy/rows.py",
                "else w)\n        if objective.softcap is not None:\n            dz *=",
                "else w)\n        if False:\n            dz *=",
                ("tests/ops/test_numerics.py::test_every_combination_of_options",),
            ),
            Break(
                "the logits ignore the bias",
                "reference/cross_entropy/fused_linear.py",
                "multiply(h, self.weight.t(), self.bias, raw)",
                "multiply(h, self.weight.t(), None, raw)",
                ("tests/ops/test_numerics.py::test_every_combination_of_options",),
            ),
        ),
    ),
    Case(
        17,
        "norms of sharded tensors crash, gather needlessly, or miss a sum over ranks",
        "LK #826, LK #982, LK #1076",
        (
            Break(
                "a sharded hidden axis is treated as rows",
                "liger_multi/dispatch/dtensor.py",
                "name in replicated(op) or placement.dim % arg.ndim == arg.ndim - 1",
                "name in replicated(op)",
                (
                    "tests/tools/test_regressions.py::test_dtensors_in_two_processes",
                    "tests/tools/test_regressions.py::test_sequence_parallel_norms_in_two_processes",
                ),
            ),
            Break(
                "the weight's gradient is not summed over ranks",
                "liger_multi/dispatch/dtensor.py",
                "shared = Replicate() if axis is None else Partial()",
                "shared = Replicate()",
                ("tests/tools/test_regressions.py::test_dtensors_in_two_processes",),
            ),
            Break(
                "sharded rows are gathered",
                "liger_multi/dispatch/dtensor.py",
                "for axis in (None, *range(axes - 1)):",
                "for axis in (None,):",
                ("tests/tools/test_regressions.py::test_dtensors_in_two_processes",),
            ),
        ),
    ),
    Case(
        19,
        "a preference or policy loss ignores an option or differs from the trainer's loss",
        "LK #1082, TRL #7062",
        (
            Break(
                "ratios to the sampling policy are 1",
                "liger_multi/losses/policy.py",
                'log_ratio = own - c.get("old", own.detach())',
                "log_ratio = own - own.detach()",
                ("tests/trainers/test_compat.py::test_grpo",),
            ),
            Break(
                "label smoothing is ignored",
                "liger_multi/losses/preference.py",
                "return logistic(o.beta * delta(p), o.label_smoothing)",
                "return logistic(o.beta * delta(p))",
                ("tests/losses/test_losses_preference.py::test_smoothed_labels_and_rpo",),
            ),
            Break(
                "weights of desirable and undesirable answers are ignored",
                "liger_multi/losses/preference.py",
                "weight = torch.where(good, o.desirable_weight, o.undesirable_weight)",
                "weight = torch.where(good, 1.0, 1.0)",
                ("tests/losses/test_losses_preference.py::test_kto_is_trl",),
            ),
            Break(
                "a trainer's option accepts unknown names",
                "liger_multi/compat/liger_kernel/models.py",
                "        if name not in known:\n",
                "        if False:\n",
                ("tests/trainers/test_compat.py::test_liger_kernel_config_unknown_option",),
            ),
        ),
    ),
    Case(
        20,
        "the library needs a network or writes to the home folder",
        "HK #172, HK #553",
        (
            Break(
                "the package creates a folder in the home folder",
                "liger_multi/__init__.py",
                "from liger_multi import ops\n",
                "import pathlib\n\nfrom liger_multi import ops\n\n"
                '(pathlib.Path.home() / ".liger_multi").mkdir(exist_ok=True)\n',
                ("tests/dispatch/test_import.py::test_offline_with_a_read_only_home",),
            ),
        ),
    ),
)


# --- the page ---


def page() -> str:
    """The page of regressions."""
    head = """\
# Regressions

Users of other libraries with the same operators reported these defects. Here, tests cover each of
them. The tests are mutation-tested: this command reverts each fix in a copy of the sources and
expects its tests to fail.

    python -m ci.regressions        # all; a number selects one; part of make test-full

| | Defect | Reports | Tests | They fail when |
| --- | --- | --- | --- | --- |
"""
    tail = """
## Limits

* 14 is tested with a replica of the device module. It has not run on two devices of one machine.
* 18, a vocabulary-parallel loss, has tests and no entry in this table.
"""
    rows = []
    for case in CASES:
        threads = ", ".join(_link(thread) for thread in case.threads.split(", "))
        for index, each in enumerate(case.breaks):
            tests = "<br>".join(f"`{name.removeprefix('tests/')}`" for name in each.names)
            lead = (str(case.number), case.title, threads) if index == 0 else ("", "", "")
            rows.append(f"| {' | '.join((*lead, tests, f'{each.what} (`{each.file}`)'))} |")
    return head + "\n".join(rows) + "\n" + tail


def _link(thread: str) -> str:
    name, _, number = thread.partition(" #")
    return f"[{thread}](https://github.com/{REPOSITORIES[name]}/issues/{number})"


# --- the proof ---


class StaleError(Exception):
    """The text to replace does not stand where an entry says."""


def checkout(folder: Path) -> None:
    """Copy what the tests need."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, folder / name)
    for name in ("backends", "reference"):
        link = folder / "liger_multi" / name
        if not link.exists():
            link.symlink_to(Path("..") / name, target_is_directory=True)


def broken(text: str, fix: Break) -> str:
    """The file's text without the fix."""
    if text.count(fix.old) != 1:
        raise StaleError(
            f"{fix.file}: the text to replace stands there {text.count(fix.old)} times, not once; "
            f"say in ci/regressions.py how this fix is taken out now:\n{fix.old}"
        )
    return text.replace(fix.old, fix.new)


def failures(folder: Path, fix: Break) -> list[str]:
    """Take the fix out, run its tests, put it back; the tests that failed."""
    path = folder / fix.file
    before = path.read_text(encoding="utf-8")
    path.write_text(broken(before, fix), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TRITON"))}
    environment |= {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **fix.environment,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *fix.tests],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(before, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise StaleError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)


def survivors(folder: Path, fix: Break) -> list[str]:
    """The tests of an entry of which nothing failed."""
    failed = failures(folder, fix)
    return [name for name in fix.names if not any(f.startswith(name) for f in failed)]


def selected(numbers: list[int]) -> Iterator[tuple[Case, Break]]:
    """The breaks of some cases, or of all."""
    for case in CASES:
        if not numbers or case.number in numbers:
            yield from ((case, each) for each in case.breaks)


def main() -> int:
    """Run; 1 where a test passes without its fix."""
    parser = argparse.ArgumentParser(description="See every regression test fail without its fix.")
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="default: all")
    wanted = list(selected(parser.parse_args().numbers))
    if not wanted:
        parser.error(f"known numbers: {', '.join(str(c.number) for c in CASES)}")
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        checkout(Path(name))
        for case, fix in wanted:
            try:
                alive = survivors(Path(name), fix)
                said = (
                    f"PASSES WITHOUT ITS FIX: {', '.join(alive)}" if alive else "fails, as wanted"
                )
            except StaleError as stale:
                alive, said = [""], f"STALE: {stale}"
            wrong += bool(alive)
            print(f"{case.number:2} {fix.what}: {said}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
