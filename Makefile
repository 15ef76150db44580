# make demo   install into .venv if need be, then run the main job on the embedded pair
# make test   install into .venv if need be, then run the tests (make test-slow: the long ones)
# make lint   ruff and mypy

PYTHON ?= python3
# Any torch from 2.8 on will do; one fixed release keeps the figures of docs/ comparable.
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: demo test test-slow lint
demo: .venv/installed
	$(BIN)/diversed demo

test: .venv/installed
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow"

test-slow: .venv/installed
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m slow

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
