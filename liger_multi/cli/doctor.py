"""``liger-multi doctor``: versions, devices, backends, and the backend of each operator."""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from liger_multi import _torch_private
from liger_multi._tested import untested
from liger_multi.cli import checking
from liger_multi.dispatch import registry
from liger_multi.dispatch.config import ENVIRONMENT_VARIABLE, current, in_quarantine
from liger_multi.dispatch.launch import device_info, proved_with
from liger_multi.files.page import Page
from liger_multi.grouping import grouped
from liger_multi.memory.measure import format_bytes

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "trl")


@dataclass(frozen=True)
class Sign:
    """Evidence of an accelerator: device nodes, perhaps a tool on the path."""

    hardware: str
    nodes: str
    tool: str = ""


SIGNS = (
    Sign("an NVIDIA GPU", "/dev/nvidia[0-9]*", "nvidia-smi"),
    Sign("an AMD GPU", "/dev/kfd", "rocm-smi"),
    Sign("an Ascend accelerator", "/dev/davinci[0-9]*"),
)


class Probes:
    """Ask things that may be absent or broken; failures are kept, never raised."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}

    def ask(self, topic: str, probe: Callable[[], Any], default: Any) -> Any:
        """The answer of ``probe``, or ``default`` and the failure under the name ``topic``."""
        try:
            return probe()
        except Exception as error:
            lines = str(error).strip().splitlines()
            self.failures[topic] = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
            return default


def run(arguments: argparse.Namespace) -> int:
    """Run ``liger-multi doctor``; 1 when it names a problem."""
    facts = collect()
    if arguments.json:
        checking.write_json(facts)
    else:
        page(facts, arguments.verbose).show()
    return 1 if any(item["kind"] == "problem" for item in facts["findings"]) else 0


def collect() -> dict[str, Any]:
    """All facts as plain data."""
    probes = Probes()
    facts: dict[str, Any] = {
        "versions": probes.ask("versions", versions, {}),
        "devices": devices(probes),
        "backends": probes.ask("backends", lambda: backends(probes), {}),
        "configuration": probes.ask("configuration", configuration, []),
        "operators": probes.ask("operators", _explained, []),
    }
    probes.ask("patching", lambda: importlib.import_module("liger_multi.patching"), None)
    facts["findings"] = probes.ask("findings", lambda: findings(facts["operators"]), [])
    facts["findings"] += [
        {"kind": "note", "text": text}
        for text in (
            *untested(facts["versions"]),
            *_switched_off(),
            *probes.ask("quarantine", in_quarantine, []),
            *probes.ask("launch tables", lambda: unproved(facts), []),
        )
    ]
    facts["findings"] += [
        {"kind": "problem", "text": f"{k}: {v}"} for k, v in probes.failures.items()
    ]
    return facts


def versions() -> dict[str, str]:
    """Versions of Python, this library and the packages it works with."""
    from liger_multi._version import __version__

    versions = {
        "liger_multi": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
    }
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # a checkout on the path has no metadata
            versions[name] = (
                "present, version unknown" if importlib.util.find_spec(name) else "not installed"
            )
    versions["torch"] = torch.__version__
    return versions


def devices(probes: Probes) -> list[dict[str, str]]:
    """The CPU and every accelerator that PyTorch sees."""
    records = [probes.ask("cpu", _cpu, {"device": "cpu"})]
    accelerator = probes.ask(
        "accelerator", lambda: torch.accelerator.current_accelerator(check_available=True), None
    )
    for index in range(
        0 if accelerator is None else probes.ask("device count", torch.accelerator.device_count, 0)
    ):
        assert accelerator is not None
        device = torch.device(accelerator.type, index)
        entry = {"device": str(device)}
        records.append(entry | probes.ask(str(device), partial(_accelerator, device), {}))
    return records


def _cpu() -> dict[str, str]:
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        name = next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
            name,
        )
    entry = {
        "device": "cpu",
        "name": name,
        "arch": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }
    with contextlib.suppress(ValueError, OSError, AttributeError):
        entry["memory"] = format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return entry


def _accelerator(device: torch.device) -> dict[str, str]:
    properties = torch.get_device_module(device).get_device_properties(device)
    entry = {"name": str(getattr(properties, "name", "?"))}
    if hasattr(properties, "total_memory"):
        entry["memory"] = format_bytes(properties.total_memory)
    info = device_info(device)
    cores = getattr(properties, "multi_processor_count", info.cores)
    return entry | {"arch": info.arch, "backend": info.backend, "cores": str(cores)}


def backends(probes: Probes) -> dict[str, dict[str, str]]:
    """Every backend: whether it is available, and its own facts."""
    records = {}
    for name, record in registry.backends().items():
        refusal = probes.ask(
            f"probe of {name}", partial(registry.unavailable, name), "its probe failed"
        )
        serves = record.device_type or "shared"
        records[name] = {"state": "available" if refusal is None else refusal, "serves": serves}
        records[name] |= probes.ask(f"description of {name}", getattr(record, "describe", dict), {})
    return records


def configuration() -> list[dict[str, Any]]:
    """The layers in force, the strongest first."""
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    records: list[dict[str, Any]] = []
    for layer in current().layers:
        origin = f" (named by {ENVIRONMENT_VARIABLE})" if layer.source == path else ""
        entry: dict[str, Any] = {"source": f"{layer.source}{origin}"}
        for device, order in layer.default.items():
            entry[f"default{f' on {device}' if device else ''}"] = ", ".join(order)
        for device, ops in layer.ops.items():
            for op, order in ops.items():
                entry[f"{op}{f' on {device}' if device else ''}"] = ", ".join(order)
        if layer.chunk_bytes is not None:
            entry["chunk_bytes"] = format_bytes(layer.chunk_bytes)
        if layer.head_gemms is not None:
            entry["head_gemms"] = layer.head_gemms
        if layer.quarantine is not None:
            for section, ops in layer.quarantine.ops.items():
                entry |= {f"{op} on {section} (quarantine)": ", ".join(o) for op, o in ops.items()}
        records.append(entry)
    origin = (
        "everything else" if records else f"no configure() call, {ENVIRONMENT_VARIABLE} is not set"
    )
    return [*records, {"source": f"built in ({origin})", "default": "auto"}]


def unproved(facts: dict[str, Any]) -> list[str]:
    """Accelerators whose launch tables were not checked with this Triton."""
    sentences, triton = [], facts["versions"].get("triton", "")
    for entry in facts["devices"]:
        device = torch.device(entry["device"])
        if device.type == "cpu" or not triton[:1].isdigit():
            continue
        info = device_info(device)
        versions = proved_with(info).get("triton", ())
        if not any(f"{triton}.".startswith(f"{version}.") for version in versions):
            versions_text = f" (with {', '.join(versions)})" if versions else ""
            sentences.append(
                f"launch numbers of {info.arch} were not proved with Triton "
                f"{triton}{versions_text}: run `liger-multi verify`"
            )
    return list(dict.fromkeys(sentences))


def _explained() -> list[dict[str, Any]]:
    import liger_multi

    return [asdict(row) for row in liger_multi.explain().rows]


def _switched_off() -> list[str]:
    """What does not work because this PyTorch lacks a private symbol."""
    return [str(symbol) for symbol in _torch_private.missing_symbols() if symbol.lost]


def findings(rows: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Things that do not fit together, as problems (to mend) and notes (to know)."""
    problems: list[tuple[str, str]] = []
    built_for = torch.accelerator.current_accelerator(check_available=False)
    available = torch.accelerator.is_available()
    for sign in SIGNS:
        usable = [
            *sorted(glob.glob(sign.nodes))[:1],
            *([sign.tool] if shutil.which(sign.tool) else []),
        ]
        if usable and not available:
            reason = (
                f"this PyTorch ({torch.__version__}) is built for CPUs only: "
                "install a build for the device"
                if built_for is None
                else f"PyTorch ({torch.__version__}, built for {built_for.type}) sees no device: "
                "driver absent or too old, or the devices are hidden by an environment variable"
            )
            problems.append(
                (
                    "problem",
                    f"there are signs of {sign.hardware} ({', '.join(usable)}), but {reason}",
                )
            )
    if os.environ.get("TRITON_INTERPRET") == "1":
        problems.append(
            (
                "note",
                "TRITON_INTERPRET=1: Triton kernels are interpreted on the CPU, for tests only",
            )
        )
    elif importlib.util.find_spec("triton") is None:
        if available:
            text = (
                "an accelerator, but no Triton: operators without a vendor's path use the reference"
            )
            problems.append(("note", text))
    else:
        failure = _triton_driver()
        if failure is not None:
            problems.append(
                (
                    "problem" if available else "note",
                    f"Triton is installed but has no driver here: {failure}",
                )
            )
    problems += [("problem", f"{text}: see --verbose") for text in failing(rows)]
    return [{"kind": level, "text": text} for level, text in problems]


def failing(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Operators that no backend may run, one line per device and directions."""
    won: dict[tuple[str, str, str], bool] = {}
    for row in rows:
        key = (row["device"], row["op"], row["direction"])
        won[key] = won.get(key, False) or row["chosen"]
    failed = grouped((key[:2], key[2]) for key, runs in won.items() if not runs)
    by_device = grouped(
        ((device, " and ".join(directions)), op) for (device, op), directions in failed.items()
    )
    return [
        f"no backend may run {', '.join(ops[:3])}{f' and {len(ops) - 3} others' * (len(ops) > 3)} "
        f"{directions} on {device}"
        for (device, directions), ops in by_device.items()
    ]


def _triton_driver() -> str | None:
    """Why Triton cannot reach a device, or None."""
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return None


def page(facts: dict[str, Any], verbose: bool = False) -> Page:
    """Lay the facts out, what to do first; ``verbose``: every candidate of every operator."""
    result = Page()
    nothing = {"kind": "", "text": "nothing: versions, devices and drivers fit together"}
    result.add("Findings", [[f["kind"], f["text"]] for f in facts["findings"] or [nothing]])
    result.add("Versions", list(facts["versions"].items()))
    keys = ("device", "name", "memory", "arch", "backend", "cores", "threads")
    columns = [k for k in keys if any(k in entry for entry in facts["devices"])]
    result.add(
        "Devices that PyTorch sees",
        [[e.get(k, "") for k in columns] for e in facts["devices"]],
        columns,
    )
    rows = []
    for name, entry in facts["backends"].items():
        details = ", ".join(f"{k} {v}" for k, v in entry.items() if k not in ("state", "serves"))
        rows.append([name, entry["state"], entry["serves"], details])
    result.add("Backends", rows, ("backend", "state", "serves", "facts"))
    rows = [
        [e["source"], "; ".join(f"{k}: {v}" for k, v in e.items() if k != "source")]
        for e in facts["configuration"]
    ]
    result.add("Configuration, the strongest first", rows, ("from", "says"))
    if verbose:
        operators(result, facts["operators"])
    else:
        rows = [row for group in _shared(facts["operators"]) for row in _chosen_on(*group)]
        result.add("Operators", rows, ("device", "backend", "operators (--verbose: and why)"))
    return result


def _shared(rows: Sequence[dict[str, Any]]) -> list[tuple[list[str], dict[str, str]]]:
    """The backend of every operator, grouped by devices with the same choice."""
    groups: list[tuple[list[str], dict[str, str]]] = []
    for device in dict.fromkeys(row["device"] for row in rows):
        serving = grouped(
            (row["op"], row["backend"] if row["chosen"] else "")
            for row in rows
            if row["device"] == device
        )
        backends_of = {
            op: " and ".join(filter(None, dict.fromkeys(names))) or "none"
            for op, names in serving.items()
        }
        devices_of_group = next(
            (
                devices_of_group
                for devices_of_group, backends_of_group in groups
                if backends_of_group == backends_of
            ),
            None,
        )
        if devices_of_group is None:
            groups.append(([device], backends_of))
        else:
            devices_of_group.append(device)
    return groups


def _chosen_on(devices: Sequence[str], serving: dict[str, str]) -> list[list[str]]:
    """A row per backend; operators of the one that serves most are counted, not named."""
    by_backend = grouped((backend, op) for op, backend in serving.items())
    ordered = sorted(by_backend, key=lambda backend: -len(by_backend[backend]))
    table = []
    for backend in ordered:
        count_text = (
            "all"
            if len(ordered) == 1
            else f"{len(by_backend[backend])}"
            if backend == ordered[0]
            else ""
        )
        devices_text = ", ".join(devices) if backend == ordered[0] else ""
        table.append([devices_text, backend, count_text or ", ".join(by_backend[backend])])
    return table


def operators(result: Page, rows: Sequence[dict[str, Any]]) -> None:
    """Add a table for every device, or for several that agree."""
    tables: list[tuple[list[str], list[list[str]]]] = []
    for device in dict.fromkeys(row["device"] for row in rows):
        table = _operators_on(device, rows)
        for devices, known_table in tables:
            if table == known_table:
                devices.append(device)
                break
        else:
            tables.append(([device], table))
    for devices, table in tables:
        title = f"Operators on {', '.join(devices)}"
        result.add(title, table, ("operator", "direction", "backend", "", "because"))


def _operators_on(device: str, rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Every candidate of every operator; the directions share a line where they agree."""
    merged = grouped(
        (
            (r["op"], r["backend"], r["chosen"], r["reason"] or f"by {r['source']}"),
            r["direction"],
        )
        for r in rows
        if r["device"] == device
    )
    table: list[list[str]] = []
    previous = None
    for (op, backend, chosen, because), directions in merged.items():
        direction = "both" if len(directions) > 1 else directions[0]
        shown_name = op if op != previous else ""
        table.append([shown_name, direction, backend, "chosen" if chosen else "-", because])
        previous = op
    return table
