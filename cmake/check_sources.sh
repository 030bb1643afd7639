#!/usr/bin/env bash
# SPDX-FileCopyrightText: The holdfast authors
# SPDX-License-Identifier: Apache-2.0

# check_sources.sh <root>        refuses what a compiler accepts and this library must not contain
# check_sources.sh --self-test   plants every violation and expects its refusal
set -euo pipefail

found=0

# refuse <rule> <extended regex> <file>...: reports each line of code that matches; comments do not count.
refuse() {
  local rule=$1 regex=$2 file hits
  shift 2
  for file in "$@"; do
    # A line is let through by the comment "not a stream_ref" under the rule that asks for it.
    hits=$(sed -E -e '/not a stream_ref/s/\.(wait|priority)//g' -e 's,(^|[[:space:]])//.*,,' "$file" |
      grep -nE -- "$regex" || true)
    if [[ -n $hits ]]; then
      found=1
      while IFS= read -r hit; do printf '%s:%s\n    refused: %s\n' "$file" "$hit" "$rule"; done <<<"$hits"
    fi
  done
}

check() {
  local root=$1 file
  local -a include=() kernels=() all=() cmake=() hits=()
  found=0
  mapfile -t include < <(find "$root/include" -type f | sort)
  mapfile -t kernels < <(find "$root/kernels" -type f | sort)
  mapfile -t all < <(find "$root"/{include,kernels,tests,benchmarks,cmake,CMakeLists.txt} -type f | sort)
  mapfile -t cmake < <(find "$root"/{CMakeLists.txt,cmake,tests,benchmarks} -type f \
    \( -name CMakeLists.txt -o -name '*.cmake' -o -name '*.cmake.in' \) | sort)
  if ((${#include[@]} == 0 || ${#kernels[@]} == 0 || ${#cmake[@]} == 0)); then
    echo "nothing to check under $root"
    return 1
  fi

  # clang-format leaves long comments alone.
  mapfile -t hits < <(find "$root"/{include,kernels,tests,benchmarks} -regextype posix-extended \
    -regex '.*\.(hpp|cpp|cuh|cu)' -exec grep -HnE '^.{101,}' {} + || true)
  for file in "${hits[@]}"; do
    found=1
    printf '%s\n    refused: a line of more than 100 columns\n' "$file"
  done

  # They compile to nothing where the host compiler sees them first. A condition variable's wait is fine: mark its
  # line with the comment "not a stream_ref".
  refuse 'wait() and priority() of cuda::stream_ref' '(\.|->)(wait|priority)[[:space:]]*\(' "${include[@]}" "${kernels[@]}"
  refuse 'include/ must compile without kernels/' '#[[:space:]]*include.*(\.cuh|kernels/)' "${include[@]}"
  refuse 'a macro leaks into every user' '^[[:space:]]*#[[:space:]]*define' "${include[@]}" "${kernels[@]}"
  refuse 'clang 14 lacks it: use cuda::std::source_location' \
    '(^|[^:])std::source_location|<source_location>' "${include[@]}" "${kernels[@]}"
  # nvcc writes an implicit this-> into what it hands to the host compiler, so captures come in another order, and a
  # closure that a .cpp and a .cu file share would have two layouts in one program.
  refuse 'name what a lambda captures' '\[[[:space:]]*[&=][[:space:]]*[],]' "${include[@]}"
  refuse 'the driver library must not be linked' 'cuda_driver|-lcuda([^[:alnum:]_]|$)' "${cmake[@]}"

  # In comments, where it usually stands, so not by refuse(). Written with brackets so as not to find itself.
  mapfile -t hits < <(grep -nE '(^|[^[:alnum:]_])TOD[O]' "${all[@]}" /dev/null | grep -vE 'TOD[O]\(#[0-9]+\)' || true)
  for file in "${hits[@]}"; do
    found=1
    printf '%s\n    refused: a TOD''O names its issue: TOD''O(#12)\n' "$file"
  done
  return "$found"
}

self_test() {
  local dir failed=0
  dir=$(mktemp -d)
  trap 'rm -rf "$dir"' RETURN

  fresh() {
    rm -rf "${dir:?}"/*
    mkdir -p "$dir"/{include/holdfast,kernels/holdfast,tests,benchmarks,cmake}
    echo '#include <holdfast/a.hpp>' >"$dir/kernels/holdfast/a.cuh"
    echo 'target_link_libraries(a PRIVATE CUDA::cudart_static -lcudart)' >"$dir/CMakeLists.txt"
    cat >"$dir/include/holdfast/a.hpp" <<'END'
#include <cuda/std/source_location>
// Never call stream.wait() here. See std::source_location. #define is refused.
void a(cuda::std::source_location where = cuda::std::source_location::current());
void b() { idle.wait(lock); }  // a condition variable, not a stream_ref
void c();  // TODO(#12): a note with an issue
auto d = [this, &e] { return e[0]; };
END
  }
  # plant <file> <line> <part of the reason>
  plant() {
    local output
    fresh
    printf '%s\n' "$2" >>"$dir/$1"
    if output=$(check "$dir"); then
      echo "not refused: $1: $2"
      failed=1
    elif [[ $output != *"$3"* ]]; then
      printf 'refused for another reason: %s: %s\n%s\n' "$1" "$2" "$output"
      failed=1
    fi
  }

  fresh
  check "$dir" || { echo 'the clean tree was refused'; failed=1; }
  plant include/holdfast/a.hpp 'void d() { stream.wait(event); }' 'stream_ref'
  plant include/holdfast/a.hpp 'void d() { stream->wait (event); }' 'stream_ref'
  plant include/holdfast/a.hpp '    .wait(event);' 'stream_ref'
  plant kernels/holdfast/a.cuh 'int d() { return stream.priority(); }' 'stream_ref'
  plant include/holdfast/a.hpp '#include <holdfast/stream_sum.cuh>' 'without kernels'
  plant include/holdfast/a.hpp '#include "../../kernels/holdfast/x.hpp"' 'without kernels'
  plant include/holdfast/a.hpp '#define HOLDFAST_X 1' 'macro'
  plant kernels/holdfast/a.cuh '  #  define HOLDFAST_X 1' 'macro'
  plant include/holdfast/a.hpp 'void d(std::source_location where);' 'source_location'
  plant kernels/holdfast/a.cuh '#include <source_location>' 'source_location'
  plant include/holdfast/a.hpp 'auto d = [&] { return e; };' 'captures'
  plant include/holdfast/a.hpp 'auto d = [=, &f](int) { return e; };' 'captures'
  plant tests/a.cpp "// $(printf 'x%.0s' {1..98})" '100 columns'
  plant tests/a.cpp '// TOD''O: later' 'names its issue'
  plant cmake/a.cmake '# TOD''O(someone) later' 'names its issue'
  plant CMakeLists.txt 'target_link_libraries(a PRIVATE CUDA::cuda_driver)' 'driver library'
  plant cmake/a.cmake 'target_link_libraries(a PRIVATE -lcuda)' 'driver library'
  fresh
  rm "$dir/include/holdfast/a.hpp"
  if check "$dir" >/dev/null; then echo 'an empty tree was accepted'; failed=1; fi
  ((failed == 0)) && echo 'every planted violation was refused'
}

case ${1-} in
  --self-test) self_test ;;
  ''|-*) echo "usage: $0 <root> | --self-test"; exit 2 ;;
  *) check "$1" ;;
esac
