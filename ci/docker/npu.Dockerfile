# syntax=docker/dockerfile:1
# The suite on an Ascend NPU, in the image of CANN: https://quay.io/repository/ascend/cann?tab=tags
# ci/docker/run.sh npu builds and runs it; the host needs the driver and firmware alone.
# TAG names the chip: 910b (Atlas A2), a3, 310p. Which torch_npu goes with which CANN:
# https://gitcode.com/Ascend/pytorch ("Version Matching Table"; 2.10.0 with CANN 9.0.0)
ARG TAG=9.0.0-910b-ubuntu22.04-py3.11
FROM quay.io/ascend/cann:${TAG}
ARG TORCH=2.10.0
ARG TORCH_NPU=2.10.0
ARG TRITON_ASCEND=3.2.0
# where CANN's installer puts its environment; ascend-toolkit/set_env.sh before CANN 8.5
ARG CANN_ENV=/usr/local/Ascend/cann/set_env.sh
ENV CANN_ENV=${CANN_ENV}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Device nodes belong to HwHiAiUser, 1000:1000, and nobody else may open them:
# https://github.com/vllm-project/vllm-ascend/issues/9490
USER root
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 --non-unique tester \
    && useradd --create-home --uid 1000 --gid 1000 --non-unique tester \
    && install --directory --owner 1000 --group 1000 /home/tester/liger-multi
RUN python3 -m pip install --no-cache-dir "torch==${TORCH}" \
        --index-url https://download.pytorch.org/whl/cpu \
    && python3 -m pip install --no-cache-dir "torch-npu==${TORCH_NPU}" \
        "triton-ascend==${TRITON_ASCEND}" pybind11 "numpy<2.4" pyyaml
USER tester
WORKDIR /home/tester/liger-multi

# what decides the environment comes first, so that a change of code does not build it again
COPY --chown=1000:1000 pyproject.toml setup.py Makefile README.md LICENSE ./
COPY --chown=1000:1000 ci/__init__.py ci/venv.py ci/
COPY --chown=1000:1000 ci/constraints/pinned.txt ci/constraints/
COPY --chown=1000:1000 liger_multi/__init__.py liger_multi/_version.py liger_multi/
COPY --chown=1000:1000 backends/__init__.py backends/
COPY --chown=1000:1000 reference/__init__.py reference/
# an image is built without a driver, and torch_npu would look for one as torch is imported
RUN TORCH_DEVICE_BACKEND_AUTOLOAD=0 make env
COPY --chown=1000:1000 . .
RUN touch .venv/.stamp && TORCH_DEVICE_BACKEND_AUTOLOAD=0 make env

ENTRYPOINT ["/bin/bash", "-c", "source \"${CANN_ENV}\" && exec make \"$@\"", "make"]
CMD ["test", "BACKEND=npu"]
