"""Versions of transformers, as ``liger_kernel.transformers.monkey_patch`` names them."""

from __future__ import annotations

import importlib.metadata

from packaging.version import parse

transformer_version = parse(importlib.metadata.version("transformers"))
MIN_SUPPORTED_TRANSFORMERS_VERSION = parse("5.0.0")
IS_TRANSFORMERS_V5_OR_LATER = transformer_version >= MIN_SUPPORTED_TRANSFORMERS_VERSION
