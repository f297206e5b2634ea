#!/usr/bin/env bash
# Build the image of a backend, verify operators and run the suite in it, and fetch the results:
#   ci/docker/run.sh cuda                      make --keep-going verify test BACKEND=cuda
#   ci/docker/run.sh rocm demo                 another target of make, with its variables
# Variables: RESULTS (folder, default build/results), BUILD_ARGS ("--build-arg TAG=..."), DOCKER (docker),
# NPU (the device node, default /dev/davinci0).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
backend=${1:?which backend? one of: $(cd "$root/ci/docker" && echo *.Dockerfile)}
shift
docker=${DOCKER:-docker}
results=${RESULTS:-build/results}
file=$root/ci/docker/$backend.Dockerfile
if [ ! -f "$file" ]; then
  echo "no image for the backend '$backend': $file is absent" >&2
  exit 2
fi

need() {  # device nodes without which the suite could not even start
  for node in "$@"; do
    if [ ! -e "$node" ]; then
      echo "BACKEND=$backend needs $node, which this machine does not have" >&2
      exit 2
    fi
  done
}

devices=()
case $backend in
  cpu) ;;
  cuda)
    need /dev/nvidiactl
    devices=(--gpus all)
    ;;
  rocm)
    # https://rocm.docs.amd.com/projects/install-on-linux/en/latest/how-to/docker.html
    need /dev/kfd /dev/dri
    devices=(--device=/dev/kfd --device=/dev/dri --security-opt seccomp=unconfined)
    for node in /dev/kfd /dev/dri/renderD*; do  # their groups have other numbers on every host
      devices+=(--group-add "$(stat -c %g "$node")")
    done
    ;;
  npu)
    # https://www.hiascend.com/document/detail/en/mindx-dl/300/dluserguide/toolboxug/toolboxug_0008.html
    npu=${NPU:-/dev/davinci0}
    need "$npu" /dev/davinci_manager /dev/devmm_svm /dev/hisi_hdc
    devices=("--device=$npu" --device=/dev/davinci_manager --device=/dev/devmm_svm --device=/dev/hisi_hdc)
    for path in /usr/local/dcmi /usr/local/bin/npu-smi /usr/local/Ascend/driver /etc/ascend_install.info; do
      if [ -e "$path" ]; then devices+=(--volume "$path:$path:ro"); fi
    done
    ;;
  *)
    echo "no devices are known for the backend '$backend'" >&2
    exit 2
    ;;
esac

if [ $# -eq 0 ]; then set -- --keep-going verify test "BACKEND=$backend"; fi
read -ra arguments <<<"${BUILD_ARGS:-}"
image=liger-multi-ci:$backend
container=liger-multi-ci-$backend-$$
commit=${COMMIT:-$(git -C "$root" rev-parse HEAD 2>/dev/null || echo unknown)}
"$docker" build --file "$file" --tag "$image" "${arguments[@]}" "$root"
trap '"$docker" rm --force "$container" >/dev/null 2>&1 || true' EXIT
code=0
"$docker" run --name "$container" --init --shm-size=2g --security-opt=no-new-privileges \
  "${devices[@]}" --env "COMMIT=$commit" "$image" "$@" RESULTS=build/results || code=$?
# copied out rather than mounted: the user in the container is nobody on the host
mkdir -p "$results"
"$docker" cp "$container:/home/tester/liger-multi/build/results/." "$results" || echo "no results to copy" >&2
exit "$code"
