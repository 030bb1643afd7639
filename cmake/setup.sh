#!/usr/bin/env bash
# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# bash cmake/setup.sh demo [argument...]   installs what is missing, builds graph_replay and runs it with the arguments
# bash cmake/setup.sh test                 installs what is missing, builds everything and runs every test
#
# HOLDFAST_PRESET chooses the configure preset (default: release); the build goes to build/<preset>. It is compiled for
# the GPUs of this machine, or for sm_90a if there are none; CUDAARCHS overrides that.
set -euo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=${HOLDFAST_PRESET:-release}

say() { printf 'holdfast: %s\n' "$*"; }
fail() {
  printf 'holdfast: %s\n' "$@" >&2
  exit 1
}

has_header() { echo "#include <$1>" | c++ -x c++ -E - >/dev/null 2>&1; }

# Debian packages for what is missing; by command and header, so that another source of them counts as well.
missing_tools() {
  command -v c++ >/dev/null || echo g++
  command -v cmake >/dev/null || echo cmake
  command -v ninja >/dev/null || echo ninja-build
}
missing_for_demo() {
  missing_tools
  has_header nlohmann/json.hpp || echo nlohmann-json3-dev
}
missing_for_test() {
  missing_for_demo
  has_header gtest/gtest.h || echo libgtest-dev
  has_header benchmark/benchmark.h || echo libbenchmark-dev
}

# install_packages <missing> <required>: two functions that list packages; without those of the first the rest still
# works, without those of the second nothing does.
install_packages() {
  local -a packages
  local package
  mapfile -t packages < <("$1")
  ((${#packages[@]})) || return 0
  if ! command -v apt-get >/dev/null; then
    fail "missing: ${packages[*]} (Debian package names); install them and run this again"
  fi
  if ((EUID != 0)); then
    fail "missing: ${packages[*]}; run this, then this script again:" \
      "  sudo apt-get update && sudo apt-get install --no-install-recommends ${packages[*]}"
  fi
  say "installing ${packages[*]}"
  apt-get update -qq || say "apt-get update failed; trying to install all the same"
  # One by one: one that cannot be had may be one that is not needed.
  for package in "${packages[@]}"; do
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null ||
      say "could not install $package"
  done
  mapfile -t packages < <("$2")
  ((${#packages[@]} == 0)) || fail "cannot go on without: ${packages[*]}"
}

# The first nvcc of CUDA 13 or later, for CMake to use.
find_nvcc() {
  local candidate release major seen=
  for candidate in "${CUDACXX-}" "$(command -v nvcc || true)" ${CUDA_HOME:+"$CUDA_HOME/bin/nvcc"} \
    /usr/local/cuda/bin/nvcc; do
    command -v "$candidate" >/dev/null || continue
    release=$("$candidate" --version | sed -n 's/.*release \([0-9]*\)\.\([0-9]*\).*/\1.\2/p')
    major=${release%%.*}
    if ((major >= 13)); then
      export CUDACXX=$candidate
      return
    fi
    seen+=" $candidate is CUDA $release;"
  done
  fail "no nvcc of CUDA 13.0 or later.${seen:+ Found:$seen}" \
    'It is part of the CUDA Toolkit: https://developer.nvidia.com/cuda-downloads' \
    'Searched: CUDACXX, PATH, CUDA_HOME/bin, /usr/local/cuda/bin.'
}

# One compiler per core, and no more than memory allows: nvcc takes up to 2 GB.
parallel_jobs() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable:/ {print int($2 / 2000000)}' /proc/meminfo)
  ((memory < 1)) && memory=1
  echo $((cores < memory ? cores : memory))
}

check_cmake() {
  local version
  version=$(cmake --version | sed -n '1s/.* //p')
  [[ $(printf '3.25\n%s\n' "$version" | sort -V | head -n 1) == 3.25 ]] ||
    fail "CMake is $version; 3.25 or later is needed: https://cmake.org/download"
}

find_tools() {
  check_cmake
  find_nvcc
  say "nvcc: $CUDACXX"
}

# The architectures to compile for, empty for the project's choice.
architectures() {
  if [[ -n ${CUDAARCHS-} ]]; then
    echo "$CUDAARCHS"
    return
  fi
  # 9.0 is sm_90a, for which the kernels are tuned.
  { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true; } |
    sed -n 's/^\([0-9]\+\)\.\([0-9]\)$/\1\2/p' | sed 's/^90$/90a/' | sort -u | paste -sd ';'
}

configure() {
  local found
  found=$(architectures)
  cmake --preset "$preset" ${found:+"-DCMAKE_CUDA_ARCHITECTURES=$found"}
}

# What the build had to leave out, and why.
left_out() { [[ ! -s build/$preset/left_out.txt ]] || sed 's/^/holdfast: left out: /' "build/$preset/left_out.txt"; }

run_demo() {
  local log
  [[ $preset != asan && $preset != tsan ]] || fail "the demo has no build with a sanitizer; use another HOLDFAST_PRESET"
  install_packages missing_for_demo missing_for_demo
  find_tools
  # The output of the build is of no interest unless it fails: the report is what is to be seen.
  log=$(mktemp)
  say "building graph_replay (a minute or two)"
  if ! { configure &&
    cmake --build --preset "$preset" --target graph_replay --parallel "$(parallel_jobs)"; } >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    left_out >&2
    fail "graph_replay could not be built"
  fi
  rm -f "$log"
  echo
  local program=$PWD/build/$preset/benchmarks/graph_replay
  cd "$caller" # paths among the arguments are the caller's
  "$program" "$@"
}

run_tests() {
  install_packages missing_for_test missing_tools
  find_tools
  configure
  cmake --build --preset "$preset" --parallel "$(parallel_jobs)"
  left_out
  # Last, so that the closing line of ctest ends the output. GPU tests show as skipped without a GPU.
  ctest --preset "$preset" --parallel "$(parallel_jobs)"
}

case ${1-} in
  demo) run_demo "${@:2}" ;;
  test) run_tests ;;
  *)
    echo "usage: bash cmake/setup.sh demo [argument of graph_replay...] | test" >&2
    exit 2
    ;;
esac
