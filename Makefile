# The first Python of a supported version; say PYTHON=... for another.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
AOT_VENV := .venv-aot
# One process per two cores' worth of XLA threads; memory stays under 8 GiB.
JOBS ?= 2

.PHONY: install decode lint test test-slow portability clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; install one or pass PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

decode: install  ## Continue the opening of a novel with two layers of KV on the device
	$(BIN)/python -m swapkv_jax.decode --raw --prompt-file tests/texts/emma.txt --max-new-tokens 64 \
		--cache layer --report decode.report.json

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -m slow

# In an environment of its own: with these compilers installed JAX would look for their devices everywhere.
# PORTABILITY="--targets v5e,h100 --model smollm2-135m" does less; without it the page of documentation is rewritten.
PORTABILITY ?= --markdown tools/portability.md
portability:  ## Compile every decode graph for TPUs and GPUs that are not here (600 MB of compilers)
	test -x $(AOT_VENV)/bin/python || $(PYTHON) -m venv $(AOT_VENV)
	$(AOT_VENV)/bin/python -m pip install --quiet --editable '.[test,aot-tpu,aot-cuda]'
	JAX_PLATFORMS=cpu $(AOT_VENV)/bin/python -m pytest -m "not slow" \
		tests/test_portability.py tests/test_in_graph.py tests/test_kernels_gather_attention.py
	$(AOT_VENV)/bin/python tools/portability.py --json portability.report.json $(PORTABILITY)

clean:
	rm -rf $(VENV) $(AOT_VENV) build dist *.egg-info *.report.json
