"""Backends from a YAML file: what it pins, what would run, and why the rest would not.

    python examples/yaml_override.py --tiny

On a GPU:

    python examples/yaml_override.py --model Qwen/Qwen2.5-0.5B --config examples/backends.yaml
"""

from collections.abc import Sequence
from pathlib import Path

import _common

import liger_multi

FILE = Path(__file__).with_name("backends.yaml")


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = _common.parser(__doc__)
    parser.add_argument("--config", default=FILE, help="a YAML file")
    options = _common.parsed(parser, arguments)
    device = _common.device_of(options)
    tokenizer, model = _common.load(options)
    model.to(device)
    ids = tokenizer("one two three and so on", return_tensors="pt").input_ids.to(device)

    print(Path(options.config).read_text())
    liger_multi.configure(options.config)
    try:
        for name in ("rms_norm", "swiglu", "fused_linear_cross_entropy"):
            print(liger_multi.explain(name, device=device.type), end="\n\n")
        print(liger_multi.patch(model))
        losses = [model(input_ids=ids, labels=ids).loss.item()]
        with liger_multi.use(default="reference"):  # narrower than the file, for this block
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    finally:
        liger_multi.configure(None)  # back to `auto`
    print(f"loss {losses[0]:.6f} as configured, {losses[1]:.6f} with the reference alone")
    return losses


if __name__ == "__main__":
    main()
