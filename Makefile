# Two commands: `make train` and `make test`. Needed: Python >= 3.11, make, a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is compiled when a module is first imported: most modules of the packages never are, and all of them take 30 s.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
WORKDIR ?= runs/stdlib-tiny

.PHONY: train test test-pairs test-all test-peers plan-tpu wheel dist sbom lock docs docs-check lint format clean

train: $(VENV)/.train  ## train a small model on the source of Python's standard library (under 5 minutes on 2 cores)
	$(BIN)/plimsoll train --config=stdlib-tiny --workdir=$(WORKDIR)

# Tests start processes that import JAX, which takes twice as long without bytecode.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.dev  ## every invariant once, in 6 minutes on 2 cores
	$(PYTEST) -m "not pairs and not slow and not peers"

test-pairs: $(VENV)/.dev  ## a sixth of the other cases, drawn by the commit: settings in pairs, real processes, compilers
	$(PYTEST) -m "pairs and not slow and not peers" --draw=6

test-all: $(VENV)/.dev  ## every test, whole products of settings too (hours); -m "not slow" leaves those out
	$(PYTEST) -m "not peers"

test-peers: $(VENV)/.peers  ## against torch and transformers, live; PEERS=--draw=3 for a third, drawn by the commit
	$(PYTEST) -m peers $(PEERS)

wheel: $(VENV)/.train  ## dist/plimsoll_train-*.whl, which `pip install` takes anywhere
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	rm -rf build/lib build/bdist.*

# Tools that build and check a release, in an environment of their own.
RELEASE := build/release/bin

$(RELEASE)/python: requirements/release.txt
	$(PYTHON) -m venv build/release
	$@ -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes --requirement requirements/release.txt
	touch $@

dist: $(RELEASE)/python  ## dist/: wheel and source distribution, checked as PyPI would
	rm -rf build/lib build/bdist.* dist
	$(RELEASE)/python -m build --outdir dist .
	$(RELEASE)/twine check --strict dist/*
	$(RELEASE)/check-wheel-contents dist/*.whl

SBOMS := base cuda tpu

sbom: $(RELEASE)/python  ## build/sbom/*.cdx.json: CycloneDX bills of materials of requirements/*.txt
	mkdir -p build/sbom
	for name in $(SBOMS); do \
	    $(RELEASE)/cyclonedx-py requirements requirements/$$name.txt --pyproject pyproject.toml \
	        --mc-type application --output-reproducible --output-file build/sbom/$$name.cdx.json || exit 1; \
	done
	$(RELEASE)/python -m tools.release stamp build/sbom/*.cdx.json

# Versions of constraints.txt, with the hashes of the files for all platforms and for Python 3.11 and later.
COMPILE := $(RELEASE)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
    --custom-compile-command "make lock" --constraint constraints.txt

lock: $(RELEASE)/python  ## requirements/*.txt anew, after pyproject.toml or constraints.txt changed
	$(COMPILE) pyproject.toml requirements/build.in --output-file requirements/base.txt
	$(COMPILE) pyproject.toml requirements/build.in --extra cuda --output-file requirements/cuda.txt
	$(COMPILE) pyproject.toml requirements/build.in --extra tpu --output-file requirements/tpu.txt
	$(COMPILE) requirements/release.in --output-file requirements/release.txt

docs: $(VENV)/.docs  ## build/site: the documentation as a site; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-check: docs $(VENV)/.docs-check  ## every page, search and dark mode of the site in Chromium; PICTURES=docs/images takes pictures
	$(BIN)/python -m tools.site_check $(if $(PICTURES),--pictures=$(PICTURES))

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/zizmor --offline --quiet .github action.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-actions action.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.train

plan-tpu: $(VENV)/.plan-tpu  ## the TPU's compiler (700 MB): plans for TPUs, and the tests that compile for them

$(VENV)/.plan-tpu: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev,plan-tpu]'
	touch $@ $(VENV)/.dev $(VENV)/.train

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[docs]'
	touch $@ $(VENV)/.train

$(VENV)/.docs-check: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[docs-check]'
	touch $@ $(VENV)/.docs $(VENV)/.train

$(VENV)/.peers: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev,peers]'
	touch $@ $(VENV)/.dev $(VENV)/.train
