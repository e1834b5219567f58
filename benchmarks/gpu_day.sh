#!/usr/bin/env bash
# All that is to be seen on a GPU, by two commands: what it needs is collected where there are registries, and run where there are none.
#
#   benchmarks/gpu_day.sh collect [FOLDER]               FOLDER (build/gpu_day): our wheel, the wheels that it needs, tests and benchmarks
#   FOLDER/gpu_day.sh run [OUT] [PART...]                OUT (gpu_day_out): report.md, report.json, logs.tar.gz
#
# The machine with the GPU has Python 3.12, NumPy, SciPy and cupy-cuda13x, and perhaps PyTorch and JAX; all else is carried, in less than 64 MiB.
# Each part ends within 9 minutes, and parts that are tests run side by side where there are 8 cores. Where one command may not last as long as all parts, name some at a time with the same OUT, or bring the parts
# of earlier calls back into OUT/parts: the report is of all that lie there. What did not run is in the report, with the reason.
# GPU_DAY_SECONDS bounds the whole run: parts that no time is left for are named. GPU_DAY_PYTHON is the interpreter.
set -euo pipefail

PARTS=(config arrays kernels programs transfers meshes nccl training spilling small_calls refusals headers calls derivatives layouts benchmark memcheck racecheck initcheck synccheck)
LIMIT=540 # seconds of one part
MOST=$((64 << 20))
# Of test_kernels.py, what ends under the sanitizer: our own kernels, of two dtypes, and no test of 10^6 elements and more (test_small_calls.py has small ones).
SMALL="(bfloat16 or not float16) and not float64 and not complex and not more_elements and not masks and not current_stream and not large_calls and not convolutions and not cudnn"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { echo "gpu_day: $*" >&2; }

collect() {
    local root folder build=${TMPDIR:-/tmp}/gpu_day.$$
    root=$(cd "$here/.." && pwd)
    folder=${1:-$root/build/gpu_day}
    rm -rf "$folder" && mkdir -p "$folder/wheels" "$build"
    trap 'rm -rf "$build"' RETURN
    # Our wheel is without kernels in C where those are not for Python 3.12 on Linux: they are built for the interpreter that builds.
    git -C "$root" diff --quiet HEAD || say "changes that are not committed stay behind"
    git -C "$root" archive HEAD | tar -x -C "$build"
    local python=${GPU_DAY_PYTHON:-python3.12}
    "$python" -m pip wheel -q --no-deps -w "$folder/wheels" "$build"
    # What the image has stays out, with what is large: NumPy, SciPy, CuPy.
    "$python" -m pip download -q --only-binary=:all: -d "$build/all" \
        "$folder"/wheels/meshtape-*.whl pytest pytest-timeout pytest-xdist hypothesis safetensors
    # Without what its other kernels need, which is large. cuDNN itself comes with the image's PyTorch.
    "$python" -m pip download -q --only-binary=:all: --no-deps -d "$folder/wheels" nvidia-cudnn-frontend
    find "$build/all" -name '*.whl' ! -name 'numpy-*' ! -name 'scipy-*' ! -name 'meshtape-*' -exec mv {} "$folder/wheels/" \;
    tar -C "$build" --exclude=tests/storage --exclude=tests/docs -czf "$folder/sources.tar.gz" pyproject.toml tests benchmarks
    cp "$here/gpu_day.sh" "$folder/"
    git -C "$root" rev-parse HEAD >"$folder/commit"
    local size
    size=$(du -sb "$folder" | cut -f1)
    say "$folder has $((size >> 20)) MiB in $(find "$folder/wheels" -name '*.whl' | wc -l) wheels"
    if ((size >= MOST)); then
        say "more than may be carried ($((MOST >> 20)) MiB)" && return 1
    fi
}

# A part, by its name: its log and, of tests, their results are in OUT/parts.
part() {
    local name=$1 left=$2 tests=()
    local log=$out/parts/$name.log xml=$out/parts/$name.xml status=0 command=()
    local pytest=("$python" -m pytest -q -p no:cacheprovider --timeout 300 --junitxml "$xml")
    case $name in
    config) command=("$python" benchmarks/gpu_day_report.py config) ;;
    arrays | kernels | programs | transfers | meshes | nccl | training | spilling | small_calls | refusals) tests=("tests/gpu/test_$name.py") ;;
    # Our numbers of the libraries beside those of NVIDIA's wheels, which PyTorch brings with it.
    headers) tests=(tests/gpu/contract/test_contract.py tests/gpu/contract/test_attention_by_cudnn.py -m "slow or not slow" -k "numbers_are_those or plans") ;;
    calls | derivatives | layouts) tests=(tests/gpu/test_every_op.py -k "test_$name") ;;
    benchmark) command=("$python" benchmarks/gpu.py --quick --json "$out/parts/benchmark.rows.json") ;;
    memcheck | racecheck | initcheck | synccheck)
        if ! command -v compute-sanitizer >/dev/null; then
            "$python" benchmarks/gpu_day_report.py skip "$out" "$name" "compute-sanitizer is not on the path" && return
        fi
        # Without CuPy's pool, whose blocks would hide what is read or written beside an array, and what no one wrote.
        pytest=(compute-sanitizer --tool "$name" --error-exitcode 86 --target-processes all "${pytest[@]}" -p gpu_day_plain_memory)
        tests=(tests/gpu/test_kernels.py tests/gpu/test_small_calls.py -k "$SMALL")
        ;;
    esac
    if [[ " calls derivatives layouts memcheck racecheck initcheck synccheck " == *" $name "* ]] && (($(nproc) >= 8)); then
        tests+=(-n 8 --dist load) # most of the time is the compiler's; by default a file is one process's
    fi
    if ((${#tests[@]})); then
        command=("${pytest[@]}" "${tests[@]}")
    fi
    rm -f "$xml" "$out/parts/$name.rows.json" # of an earlier call
    say "$name, at most $left s"
    local began=$SECONDS
    # First as by Ctrl-C, after which pytest still writes what it has.
    timeout -s INT -k 20 "$left" "${command[@]}" >"$log" 2>&1 || status=$?
    # The status of a worker process of the tests is not that of the tests: the sanitizer's words count, and their absence.
    if [[ $name == *check && $status == 0 ]] && { ! grep -q "SUMMARY: 0" "$log" || grep -q "SUMMARY: [1-9]" "$log"; }; then
        status=86
    fi
    "$python" benchmarks/gpu_day_report.py note "$out" "$name" "$status" $((SECONDS - began)) "$left" "${command[*]}"
}

run() {
    local out=${1:-gpu_day_out} name work
    [[ -e $here/sources.tar.gz ]] || { say "run the copy in the collected folder: FOLDER/gpu_day.sh run" && return 2; }
    shift || true
    for name in "$@"; do
        [[ " ${PARTS[*]} " == *" $name "* ]] || { say "there is no part $name: ${PARTS[*]}" && return 2; }
    done
    mkdir -p "$out/parts"
    out=$(cd "$out" && pwd)
    work=$(mktemp -d)
    # shellcheck disable=SC2064 # the folder of now
    trap "rm -rf '$work'" EXIT
    local chosen=("$@")
    ((${#chosen[@]})) || chosen=("${PARTS[@]}")
    local end=$((SECONDS + ${GPU_DAY_SECONDS:-86400})) python=${GPU_DAY_PYTHON:-python3}
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-warn-script-location --target "$work/site" "$here"/wheels/*.whl
    tar -xzf "$here/sources.tar.gz" -C "$work"
    cp "$here/commit" "$out/parts/commit"
    printf 'import cupy\n\ncupy.cuda.set_allocator(None)\n' >"$work/site/gpu_day_plain_memory.py"
    export PYTHONPATH=$work/site PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$work/bytecode
    cd "$work"
    for name in "${chosen[@]}"; do
        case $name in
        arrays | kernels | programs | transfers | meshes | nccl | training | spilling | small_calls | headers | calls | derivatives | layouts) ;;
        *) wait ;; # times, and what the sanitizer says, are of a device without other work
        esac
        local left=$((end - SECONDS))
        if ((left < 30)); then
            "$python" benchmarks/gpu_day_report.py skip "$out" "$name" "no time was left of GPU_DAY_SECONDS=$GPU_DAY_SECONDS"
            continue
        fi
        if (($(nproc) >= 8)); then
            part "$name" $((left < LIMIT ? left : LIMIT)) &
        else
            part "$name" $((left < LIMIT ? left : LIMIT))
        fi
    done
    wait
    tar -C "$out/parts" -czf "$out/logs.tar.gz" .
    "$python" benchmarks/gpu_day_report.py report "$out" "${PARTS[@]}"
}

case ${1:-} in
collect | run) "$@" ;;
*) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && exit 2 ;;
esac
