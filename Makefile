# The first Python of a supported version; say PYTHON=... for another.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# One process per two cores' worth of XLA threads; memory stays under 8 GiB.
JOBS ?= 2

.PHONY: install decode lint test test-slow clean

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
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow"

test-slow: install
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) build dist *.egg-info decode.report.json
