# Every target runs in .venv, which is made on first use and again when its requirements change. With TORCH=2.15.0 it
# runs with that torch instead, with PYTHON=python3.10 by that Python, with LIBRARIES=oldest or newest with those of
# Accelerate, Transformers and Lightning, in an environment of its own. Without a CPU build of that torch for that Python
# this is a download of gigabytes.

VENV  := .venv$(addprefix -torch-,$(TORCH))$(addprefix -,$(PYTHON))$(addprefix -,$(LIBRARIES))
CORE  := $(VENV)/.core
READY := $(VENV)/.ready
BIN   := $(VENV)/bin

export PIP_QUIET := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Empty: hundreds of processes need not compile zero and the tests again, whatever the user's own setting is.
export PYTHONDONTWRITEBYTECODE :=
# Tests run in two processes at once, each with ranks of its own: with a thread for each core of the machine in every
# process, they would wait for one another.
export OMP_NUM_THREADS := 1

.PHONY: help check test test-quick mutants matrix-of-versions nightly faults hosts clusters gpu lent fuzz axes matrix soak stages bench peers docs dist clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' Makefile

check: $(READY)  ## Lint, formatting, schemas of workflows, types of zero/ and of the code in the documentation
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.readthedocs .readthedocs.yaml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	@$(BIN)/python tests/docs/typed.py .mypy_cache/documented
	@MYPYPATH=.mypy_cache $(BIN)/mypy --no-error-summary zero .mypy_cache/documented

test: $(READY)  ## Run the tests; ARGS="-k name" chooses, TORCH=2.15.0 takes another torch, PYTHON=python3.10 that Python, LIBRARIES=oldest those
	@$(BIN)/pytest -q -n 2 --dist worksteal $(ARGS)

test-quick: $(READY)  ## One test in five, none that takes a third of a second; ARGS="tests/oss" chooses
	@$(BIN)/pytest -q -n 2 --dist worksteal -m "not slow" $(ARGS)

matrix-of-versions: $(READY)  ## The quick tests and the integrations' by each Python, torch and other library at hand; ends with a table
	@$(BIN)/python tests/versions.py

nightly: $(READY)  ## All that the suite has no time for: mutants, matrix, axes, faults, hosts, clusters, fuzz, soak, versions; ends with a table
	@$(BIN)/python tests/nightly.py

mutants: $(READY)  ## Put errors into zero one by one: which test catches each; ARGS="old-master late-gather" chooses
	@$(BIN)/python tests/mutants.py $(ARGS)

fuzz: $(READY)  ## Random models at every stage beside torch alone; CASES=2000 tries more than 500
	@ZERO_FUZZ=$(or $(CASES),500) $(BIN)/pytest -q -p no:xdist tests/parity/test_random_models.py $(ARGS)

axes: $(READY)  ## Small programs at 300 points of slow ranks, layouts, dtypes, hooks, kept objects; DRAWS=2000 tries more
	@ZERO_AXES=$(or $(DRAWS),300) $(BIN)/pytest -q -p no:xdist tests/parity/test_axes.py::test_axes $(ARGS)

matrix: $(READY)  ## Checkpoints of every stage to every other, 50 kills, all steps beside plans
	@ZERO_MATRIX=1 $(BIN)/pytest -q -m matrix $(ARGS)

faults: $(READY)  ## Every way in which a rank or a link may fail, 30 kills under torchrun, 2,000 altered checkpoints
	@ZERO_FAULTS=1 $(BIN)/pytest -q -m faults $(ARGS)

# Not what sends nothing, or what host memory alone has.
hosts: $(READY)  ## All that sends as between hosts: no rank reads another's memory
	@ZERO_HOST_MEMORY=0 $(BIN)/pytest -q -n 2 --dist worksteal \
		$(patsubst %,--ignore tests/%,docs harness integrations measure plan comm/test_host_memory.py) \
		tests $(ARGS)

clusters: $(VENV)-clusters/.ready  ## The examples of Ray Train, Kubernetes and a notebook, as these run them
	@ZERO_CLUSTERS=1 $(VENV)-clusters/bin/python -m pytest -q -p no:xdist tests/clusters $(ARGS)

# What a GPU may tell something about that the CPU does not, about 1,000 tests. READY= BIN=/usr/bin takes an installed
# Python with torch and pytest-xdist instead of .venv.
ON_GPUS := tests/parity tests/faults/test_faults.py tests/oss tests/sdp tests/offload \
	$(patsubst %,tests/comm/test_%.py,comm watchdog) \
	$(patsubst %,tests/fsdp/test_%.py,construction full_params mixed_precision other_stream prefetch reentry)

gpu: $(READY)  ## The tests to which a GPU matters, on the GPUs of this machine, over NCCL; WORKERS=8 runs more at once
	@ZERO_TEST_DEVICE=cuda $(BIN)/python -m pytest -q -n $(or $(WORKERS),5) --dist worksteal $(ON_GPUS) $(ARGS)

lent: $(READY)  ## Tests and benchmarks for minutes on one GPU, in turn; ARGS="--seconds 560 --only 1 3", READY= BIN= as for gpu
	@$(BIN)/python benchmarks/lent.py $(ARGS)

soak: $(READY)  ## 3,000 steps at every stage and transport: nothing grows; STEPS=10000 takes more
	@ZERO_SOAK=$(or $(STEPS),3000) $(BIN)/pytest -q -s -p no:xdist tests/harness/test_soak.py $(ARGS)

stages: $(CORE)  ## Train at every stage and compare; ARGS="--steps 5" is passed on
	@$(BIN)/python benchmarks/stages.py $(ARGS)

bench: $(READY)  ## CPU time of a step, clipping and checkpoints at every stage; ARGS="--benchmark-compare=FILE" compares
	@mkdir -p benchmarks/out
	@$(BIN)/pytest -q benchmarks --benchmark-json benchmarks/out/bench.json $(ARGS)

peers: $(VENV)/.peers  ## Train beside DDP, FSDP, FairScale and DeepSpeed; ARGS="--world 4 --link 1gbit" is passed on
	@$(BIN)/python benchmarks/peers.py $(ARGS)

docs: $(VENV)/.docs  ## Build the site into build/html, strictly; ARGS=linkcheck follows the links to other sites
	@$(BIN)/sphinx-build -q -E -W --keep-going -b $(or $(ARGS),html) -c docs . build/$(or $(ARGS),html)

# Nothing is importable beside torch, numpy and the wheel; the wheel is built from the sdist.
dist: $(VENV)/.dist  ## Build and check sdist and wheel in dist/, and run the first example by the wheel alone, on 1 and 2 ranks
	@rm -rf dist build/alone
	@$(BIN)/python -m build -qq --outdir dist
	@$(BIN)/twine check --strict dist/*
	@$(or $(PYTHON),python3) -m venv build/alone
	@build/alone/bin/pip install torch==$(or $(TORCH),2.13.0)
	@build/alone/bin/pip install -c $(VENV)/constraints.txt dist/*.whl
	@env -u PYTHONPATH build/alone/bin/python tests/docs/first_script.py

clean:  ## Remove the environment, caches and build products
	@rm -rf .venv .venv-* build dist *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find zero tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

# What zero itself and benchmarks/stages.py need. torch first and by its exact version alone: where that names a CPU
# build, nothing after it replaces it.
$(CORE): setup.cfg pyproject.toml constraints.txt
	@echo "Preparing $(VENV) (once)"
	@$(or $(PYTHON),python3) -m venv $(VENV)
	@$(BIN)/python tests/versions.py constraints "$(TORCH)" "$(LIBRARIES)" > $(VENV)/constraints.txt
	@$(BIN)/pip install "pip>=25.1"  # the first that knows --group
	@$(BIN)/pip install torch==$(or $(TORCH),2.13.0)
	@$(BIN)/pip install -c $(VENV)/constraints.txt -e . --group bench
	@touch $@

# Beside it the tests' libraries and integrations, pytest-benchmark, mypy, ruff and check-jsonschema.
$(READY): $(CORE)
	@echo "Preparing $(VENV) for tests and checks (once)"
	@$(BIN)/pip install $(if $(filter newest,$(LIBRARIES)),--upgrade) -c $(VENV)/constraints.txt --group test --group check
	@touch $@

ifeq ($(LIBRARIES),newest)
.PHONY: $(READY)  # tomorrow others are the newest
endif

$(VENV)/.docs $(VENV)/.dist: $(VENV)/.%: $(CORE)
	@$(BIN)/pip install -c $(VENV)/constraints.txt --group $*
	@touch $@

# An environment over that of the tests, in which others would find what Ray brings, such as pandas.
$(VENV)-clusters/.ready: $(READY)
	@echo "Preparing $(VENV)-clusters (once)"
	@$(or $(PYTHON),python3) -m venv $(VENV)-clusters
	@folder='import site; print(site.getsitepackages()[0])'; \
		echo "import site; site.addsitedir('$$($(BIN)/python -c "$$folder")')" \
		> $$($(VENV)-clusters/bin/python -c "$$folder")/tests.pth
	@$(BIN)/python -m pip --python $(VENV)-clusters/bin/python install -c $(VENV)/constraints.txt --group clusters
	@touch $@

# The peers are built from source. One that does not build is left out; the benchmark says which.
$(VENV)/.peers: $(READY)
	@echo "Preparing the peers (once)"
	@$(BIN)/pip install -c $(VENV)/constraints.txt --group peers
	@for peer in fairscale deepspeed; do \
		DS_ACCELERATOR=cpu $(BIN)/pip install -c $(VENV)/constraints.txt --no-deps --no-build-isolation $$peer || true; \
	done
	@touch $@
