# Everything a newcomer needs. `make demo` or `make test` may be the first and only command on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The package alone, which is enough for the demo.
USABLE := $(VENV)/.usable
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard native/*)
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: docs setup demo test-fast test test-slow check sanitize bench evidence evidence-check dist peers ray clean

setup: $(STAMP)

# Re-installed whenever the package description or a native source changes.
$(USABLE): $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(PIP) -c constraints.txt -e ".[serving]"
	@touch $(USABLE)

# The package, the developer's tools, and the programs that tests start.
$(STAMP): $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(PIP) -c constraints.txt -e ".[dev]"
	@# Real parts of tests and benchmarks: a Redis server, network namespaces, another compiler, a browser.
	@for tool in redis-server ip clang++ chromium; do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -z "$$missing" ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing with apt-get, for tests that start them:$$missing (packages redis-server, iproute2, clang, libomp-dev, chromium)"; \
		{ apt-get update -qq && apt-get install -y -qq redis-server iproute2 clang libomp-dev chromium; } >/dev/null 2>&1 || \
			echo "apt-get failed; the tests that need$$missing will be skipped"; \
	else echo "not installed:$$missing; the tests that need them will be skipped"; fi
	@touch $(USABLE) $(STAMP)

# Ends by serving the web page until Ctrl-C; `make demo DEMO_SERVE=0` ends by itself.
DEMO_SERVE ?= 1
demo: $(USABLE)
	$(BIN)/slipstream demo $(if $(filter 0,$(DEMO_SERVE)),,--serve)

check: $(STAMP)
	$(BIN)/ruff check src tests benchmarks setup.py
	$(BIN)/ruff format --check src tests benchmarks setup.py
	$(BIN)/mypy

# Unit tests: one process each, under two minutes on two cores.
test-fast: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not system and not slow"

# Everything but the slow ones: at most ten minutes on two cores.
test: check
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# Soaks, full matrices, every command of the guides, the kernels under sanitizers: at most forty minutes.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow
	tests/sanitize.sh $(BIN)/python

# Kernels built with the address and undefined-behaviour sanitizers, and the operator tests under them.
sanitize: $(STAMP)
	tests/sanitize.sh $(BIN)/python

bench: $(STAMP)
	$(BIN)/slipstream bench all

# Every recorded benchmark that is due, one after the other, then the tables of README and docs: many hours, on a quiet
# machine; started again it goes on where it was. `make evidence ONLY="tables hit"` runs some, FORCE=1 also those not due.
evidence: $(STAMP)
	@$(BIN)/python -c "import torchrec, fbgemm_gpu" 2>/dev/null || $(MAKE) peers
	$(BIN)/python -m benchmarks.evidence_run $(if $(FORCE),--force) $(ONLY)

# Quick runs against what is recorded; names what fell by more than a quarter.
evidence-check: $(STAMP)
	$(BIN)/python -m benchmarks.evidence_run --check $(ONLY)

# Wheel and sdist in dist/.
dist: $(STAMP)
	$(BIN)/python -m build --outdir dist

# The manual as a site in site/; a warning ends it.
docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict

# TorchRec and FBGEMM, which the benchmarks `tables`, `exchange` and `pipeline` compare with. TorchRec's metadata asks for CUDA, so: --no-deps.
peers: $(STAMP)
	$(PIP) --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 torchmetrics==1.0.3 \
		tensordict pyre-extensions typing-inspect mypy-extensions lightning-utilities packaging tqdm cloudpickle pyvers

# Ray Serve, for the extra of the same name.
ray: $(STAMP)
	$(PIP) -c constraints.txt "ray[serve]>=2.49"

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find src -name '*.so' -delete
