# syntax=docker/dockerfile:1
# The suite on an AMD GPU, in AMD's image of PyTorch: https://hub.docker.com/r/rocm/pytorch/tags
# ci/docker/run.sh rocm builds and runs it; the host needs the kernel driver (amdgpu-dkms) alone:
# https://rocm.docs.amd.com/projects/install-on-linux/en/latest/how-to/docker.html
ARG TAG=rocm7.2.4_ubuntu24.04_py3.12_pytorch_release_2.10.0
FROM rocm/pytorch:${TAG}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# PyTorch and its Triton stand in an environment of the image, which .venv inherits
USER root
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 tester \
    && install --directory --owner tester --group tester /home/tester/liger-multi
USER tester
WORKDIR /home/tester/liger-multi

# what decides the environment comes first, so that a change of code does not build it again
COPY --chown=tester:tester pyproject.toml setup.py Makefile README.md LICENSE ./
COPY --chown=tester:tester ci/__init__.py ci/venv.py ci/
COPY --chown=tester:tester ci/constraints/pinned.txt ci/constraints/
COPY --chown=tester:tester liger_multi/__init__.py liger_multi/_version.py liger_multi/
COPY --chown=tester:tester backends/__init__.py backends/
COPY --chown=tester:tester reference/__init__.py reference/
RUN make env
COPY --chown=tester:tester . .
RUN touch .venv/.stamp && make env

ENTRYPOINT ["make"]
CMD ["test", "BACKEND=rocm"]
