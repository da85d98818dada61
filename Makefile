# make demo           the whole pipeline on the bundled model, from nothing
# make test           the tests, from nothing
# make test-llamacpp  our model files in llama.cpp and its in our runtime; builds it first (10 min)
# make bench          decode and prefill speed against llama.cpp and the machine's limit
# make check          lint and types; writes nothing into the tree
#
# One stage on any checkpoint, with all stages before it as far as they are not up to date:
#   make generate MODEL=path/to/checkpoint VRAM=8GiB PROMPT="Once upon a time"
#   make convert | profile | solve MODEL=... [CORPUS=text.txt] [SPARSITY=0.5 for SiLU models]

PYTHON ?= python3
BIN := .venv/bin
TYPES := build/types/sparkinfer
SPARKINFER := $(BIN)/sparkinfer

MODEL ?= examples/tiny-relu
DIR ?= build/$(notdir $(patsubst %/,%,$(MODEL)))
CORPUS ?= build/corpus/train.txt
VRAM ?= 8GiB
PROMPT ?= def parse_args(argv=None):
TOKENS ?= 131072
NUM_TOKENS ?= 96
TEMPERATURE ?= 0.8
OUTTYPE ?= f16
SPARSITY ?=
CONTEXT ?=
RANK ?=
export PROMPT  # so that the shell need not quote it

.DELETE_ON_ERROR:
.PHONY: setup build demo convert profile solve generate evaluate test test-gpu test-llamacpp bench check clean FORCE

# ---- set-up -------------------------------------------------------------------------------

SOURCES := CMakeLists.txt $(shell find src convert profile solver runtime -name '*.py' \
             -o -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt)

setup: build  ## .venv with sparkinfer in it, editable, and all it needs

.venv/ready: pyproject.toml constraints.txt
	@echo "== set-up: a virtual environment in .venv (a few minutes, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@mkdir -p build && touch build/installed $@

build/installed: $(SOURCES) | .venv/ready
	@mkdir -p build
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

build: .venv/ready build/installed  ## compile the C++ again and take in new files
	@:

# ---- the pipeline --------------------------------------------------------------------------

BASE := $(DIR)/base.gguf
PROFILE := $(DIR)/model.profile.safetensors
PREDICTORS := $(DIR)/predictors/predictors.safetensors
FULL := $(DIR)/model.gguf
MACHINE := $(DIR)/machine.json
SPLIT := $(DIR)/model.split.gguf

demo:
	@$(MAKE) --no-print-directory build
	@$(MAKE) --no-print-directory evaluate generate MODEL=examples/tiny-relu DIR=build/demo \
	  VRAM=14MiB TEMPERATURE=0.7 SEED=4

convert: build $(BASE)
profile: build $(FULL)
solve: build $(SPLIT)

# Settings that decide an artifact: a file for each, written anew only where it changed.
$(DIR)/settings-%: FORCE
	@mkdir -p $(DIR)
	@echo '$($*)' | cmp -s - $@ || echo '$($*)' > $@

CONVERT_SETTINGS := $(MODEL) $(OUTTYPE)
PROFILE_SETTINGS := $(CORPUS) $(TOKENS) $(RANK) $(SPARSITY)
SOLVE_SETTINGS := $(VRAM) $(CONTEXT)

$(BASE): $(wildcard $(MODEL)/*.json $(MODEL)/*.safetensors $(MODEL)/*.bin) $(DIR)/settings-CONVERT_SETTINGS
	@echo "== convert: $(MODEL) -> $@"
	@$(SPARKINFER) convert $(MODEL) -o $@ --outtype $(OUTTYPE) --force

$(PROFILE) $(PREDICTORS) &: $(BASE) $(CORPUS) $(DIR)/settings-PROFILE_SETTINGS
	@echo "== profile: $(BASE) on $(CORPUS) -> $(PROFILE), $(PREDICTORS)"
	@$(SPARKINFER) profile $(BASE) --corpus $(CORPUS) -o $(PROFILE) --tokens $(TOKENS) --force \
	  --train-predictors $(DIR)/predictors $(if $(RANK),--predictor-rank $(RANK)) \
	  $(if $(SPARSITY),--target-sparsity $(SPARSITY))

$(FULL): $(BASE) $(PREDICTORS)
	@echo "== convert: $(BASE) and its predictors -> $@"
	@$(SPARKINFER) convert $(BASE) -o $@ --predictors $(DIR)/predictors --force \
	  $(if $(SPARSITY),--thresholds $(PROFILE))

$(MACHINE): examples/machines/rtx-4060-8gb.json
	@echo "== calibrate: this machine -> $@"
	@$(SPARKINFER) calibrate -o $@ --gpu-from $< --force

$(SPLIT): $(FULL) $(PROFILE) $(MACHINE) $(DIR)/settings-SOLVE_SETTINGS
	@echo "== solve: $(FULL) for $(VRAM) of VRAM -> $@"
	@$(SPARKINFER) solve $(FULL) --profile $(PROFILE) --machine $(MACHINE) \
	  --vram-budget $(VRAM) $(if $(CONTEXT),--context $(CONTEXT)) -o $@ --force

evaluate: build $(SPLIT) build/corpus/held-out.txt
	@echo "== eval: $(FULL) against its dense self, on text neither has seen"
	@$(SPARKINFER) eval $(FULL) --split $(SPLIT) --corpus build/corpus/held-out.txt --tokens 4096

generate: build $(SPLIT)
	@echo "== generate: $(FULL) by $(SPLIT)"
	@$(SPARKINFER) generate $(FULL) --split $(SPLIT) -p "$$PROMPT" -n $(NUM_TOKENS) \
	  --temp $(TEMPERATURE) $(if $(SEED),--seed $(SEED))

build/corpus/%.txt: examples/tiny-relu/corpus.py
	@$(BIN)/python $< --part $* -o $@

# ---- checks --------------------------------------------------------------------------------

test: build  ## what CI runs
	$(BIN)/python -m pytest -q

test-gpu: build  ## fails, rather than skips, without a CUDA device
	$(BIN)/python -c "import torch; assert torch.cuda.is_available(), 'no CUDA device here'"
	$(BIN)/python -m pytest -q -m gpu

LLAMACPP := build/llamacpp-venv
LLAMACPP_PINS := tests/llamacpp/requirements.txt

$(LLAMACPP)/ready: $(LLAMACPP_PINS)
	@echo "== set-up: llama.cpp, built from source, in $(LLAMACPP) (about ten minutes, once)"
	@$(PYTHON) -m venv $(LLAMACPP)
	@$(LLAMACPP)/bin/pip install --quiet --disable-pip-version-check \
	  --no-binary llama-cpp-python -r $(LLAMACPP_PINS)
	@touch $@

test-llamacpp: build $(LLAMACPP)/ready  ## our files in llama.cpp, its files in our runtime
	$(BIN)/python -m pytest -q -rP tests/llamacpp

BENCH_DIR ?= build/bench
bench: build $(LLAMACPP)/ready  ## decode and prefill against llama.cpp on this machine; 8 GiB in BENCH_DIR
	@mkdir -p $(BENCH_DIR)
	$(BIN)/python benchmarks/decode.py $(BENCH_DIR) --rival $(LLAMACPP)/bin/python
	$(BIN)/python benchmarks/prefill.py $(BENCH_DIR) --rival $(LLAMACPP)/bin/python

check: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p $(TYPES)
	@ln -sfn $(CURDIR)/src/sparkinfer/* $(addprefix $(CURDIR)/,convert profile solver runtime) \
	  $(TYPES)
	$(BIN)/mypy

clean:
	rm -rf build .venv
