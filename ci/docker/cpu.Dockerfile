# syntax=docker/dockerfile:1
# The suite on a CPU: references natively, kernels interpreted and cross-compiled.
# ci/docker/run.sh cpu builds and runs it.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm
ARG TORCH=torch==2.13.0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# g++ compiles what torch.compile and Triton generate
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make \
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
RUN make env TORCH="${TORCH}"
COPY --chown=tester:tester . .
RUN touch .venv/.stamp && make env

ENTRYPOINT ["make"]
CMD ["test", "BACKEND=cpu"]
