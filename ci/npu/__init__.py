"""Ascend without an NPU.

The vendor's own wheels over stub libraries, a simulated device, and kernels that go through the
vendor's compiler and, lowered by it, run on the CPU.

``make test-npu`` builds the environment and climbs the levels that docs/ascend.md describes.
"""
