# Two commands on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# A local folder of wheels that pip already knows serves uv as well.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# SkyPilot's and Ray's processes start far slower without byte code.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test check lint unit integration cloud cloud-test cloud-packages lock clean

setup: $(VENV)/.ready

$(VENV)/.ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install -q --compile-bytecode -r constraints.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install -q --no-deps -e .
	touch $@

demo: setup          ## post-train the tiny model on this machine, lose a spot node, see it go on
	$(BIN)/spotlight train tiny --spot 2 --preempt demo

lint: setup          ## style, layers, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

unit: setup          ## everything that needs no cluster
	$(BIN)/pytest -m "not ray and not cloud and not gpu"

integration: setup   ## real local Ray clusters, real kills
	$(BIN)/pytest -m "ray and not cloud and not gpu"

cloud-test: setup    ## real SkyPilot against a cloud in a box; needs root and the packages of `make cloud-packages`
	$(BIN)/pytest -s -rs --durations=0 --durations-min=20 -m cloud

cloud: setup         ## a shell on the laptop of a cloud in a box: `spotlight launch` works there; needs root
	$(BIN)/python tests/cloud/box/box.py

cloud-packages:      ## what a cloud in a box needs of Debian or Ubuntu
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
	  iproute2 openssh-server openssh-client procps python3 rsync sudo util-linux

check: lint unit

test: lint unit integration

lock:                ## refresh constraints.txt from pyproject.toml
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip compile -q --no-annotate --no-header --no-emit-find-links --python-version 3.11 \
	  --all-extras --no-emit-package spotlight-rl pyproject.toml -o constraints.txt
	sed -i 's/^torch==\([0-9.]*\)+cpu/torch==\1/' constraints.txt   # the wheel's local label is the machine's business

clean:
	rm -rf $(VENV) build dist
