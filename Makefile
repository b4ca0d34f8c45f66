.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
DEMO_INSTALLED := .venv/installed-demo
SIDE_BY_SIDE = $(shell cores=$$(nproc); echo $$((cores < 3 ? cores + 1 : 4)))

.PHONY: help install notebook wheel lock sbom bundle release-check demo demo-secure demo-clinic demo-reports demo-pairs demo-llm test test-postgresql \
  check fix system fuzz bench bench-quick bench-methods simulation mutants chaos soak fresh-check test-long test-gpu \
  image-archives image-check deploy-check migrate image clean docs

# The targets that a contributor needs often. Others have a comment, and their pages: own-data.md, testing.md, deploying.md.
help: ## show this help
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: $(INSTALLED) ## create .venv with everything in it; a demo installs only what demos need

# Modules that tests and demos import seldom or never.
NONE :=
RARELY := $(subst $(NONE) ,|,transformers/(models|exporters)/ torch/_inductor/ pydicom/sr/ numpy/distutils/ \
  sympy/(combinatorics|parsing|physics|stats)/ sklearn/(cluster|decomposition|ensemble|linear_model)/ \
  huggingface_hub/(cli|inference)/ /(async_api|databricks|fontTools|git|graphql|lexers|mlflow|moto|mypy)/ \
  /(mypyc|networkx|pip|pyasn1_modules|pymdownx|setuptools|testing|tests)/)

# The pip that comes with Python takes twice as long to choose versions. An environment of before the distribution was
# named tessera-fl has one named tessera, whose removal later would remove the command. pip would compile all files, and one at a time;
# the last line compiles those that are often imported, before several processes would at once.
define install-extra
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tessera needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(BIN)/python -m pip uninstall --yes --quiet --quiet tessera
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[$(1)]'
	$(BIN)/python -m compileall -qq -j 0 -x '$(RARELY)' .venv/lib || true
endef

# Made anew when what is to be installed changes. `dev` includes `demo`.
$(INSTALLED): pyproject.toml constraints.txt
	$(call install-extra,dev)
	@touch $(INSTALLED) $(DEMO_INSTALLED)

$(DEMO_INSTALLED): pyproject.toml constraints.txt
	$(call install-extra,demo)
	@touch $(DEMO_INSTALLED)

demo: $(DEMO_INSTALLED) ## four institutions train one transformer without sharing data
	$(BIN)/tessera demo $(if $(SCOPE),--scope $(SCOPE))

demo-secure: $(DEMO_INSTALLED) ## six sites train with secure sums: the coordinator can read no update
	$(BIN)/python -m tessera.examples.secure

# Three hospitals fine-tune adapters on synthetic notes, with privacy for each patient; docs/own-data.md.
demo-clinic: $(DEMO_INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[lora,privacy]'
	$(BIN)/python -m tessera.examples.clinic

# Three hospitals learn from synthetic notes with SAFL: half the layers travel.
demo-reports: $(DEMO_INSTALLED)
	$(BIN)/python -m tessera.examples.reports

# Four sites adapt a small CLIP with pFedDC: prompts alone travel.
demo-pairs: $(DEMO_INSTALLED)
	$(BIN)/python -m tessera.examples.pairs

# Three offices fine-tune a small Llama with LoRA; MODEL=FOLDER fine-tunes another.
demo-llm: $(DEMO_INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[lora]'
	$(BIN)/python -m tessera.examples.llm $(if $(MODEL),--model "$(MODEL)")

wheel: install ## build the wheel and the source archive into dist/, equal bit for bit each time
	$(BIN)/python -m release.packages

# UPGRADE=1: the newest versions. TORCH_CPU=FOLDER: with wheels of torch's CPU build, when its version changes; docs/releasing.md.
lock: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	$(BIN)/python -m release.locks $(if $(UPGRADE),--upgrade) $(if $(TORCH_CPU),--torch-cpu "$(TORCH_CPU)")

# What the images consist of, as CycloneDX, into dist/.
sbom: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	$(BIN)/python -m release.sbom

# Signed by KEY, which is created if it is missing. TORCH_CPU=FOLDER: with the wheel of torch's CPU build; docs/offline.md.
KEY := $(HOME)/tessera-release-key.pem
bundle: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	$(BIN)/python -m release.bundle --key "$(KEY)" $(if $(TORCH_CPU),--torch-cpu "$(TORCH_CPU)")

# All that must hold before a release, on a clean checkout of the last commit: hours, and as root. ONLY='--only images'.
release-check: install
	$(BIN)/python -m release.check $(ONLY)

# Execute examples/notebook.ipynb on a federation of two sites, and write its outputs into it.
notebook: install
	$(BIN)/python -m tessera.examples.notebook

# Side by side, one more than there are cores, since tests also wait, and at most four; each computes in one thread.
# Thousands of processes are started, each of which would compile what no other may write down.
test: install ## run every test but the long ones
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(SIDE_BY_SIDE) --dist worksteal \
	  --durations 40 --durations-min 3

# The tests of storage, API and processes, all on PostgreSQL.
test-postgresql: install
	TESSERA_TEST_DATABASE=postgresql OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/coordinator tests/system \
	  --numprocesses $(SIDE_BY_SIDE) --dist worksteal

# mypy gives its workers 3 seconds to start, which a busy machine may not meet; without them it takes twice as long.
check: install ## format, lint, prose, types; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.prose
	$(BIN)/mypy --num-workers 2 || $(BIN)/mypy

fix: install ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The tests with real processes and real crashes alone.
system: install
	$(BIN)/python -m pytest tests/system

test-long: install ## the tests that take long or need a quiet machine, and those of research/
	TESSERA_TEST_LONG=1 $(BIN)/python -m pytest -m long
	$(MAKE) soak ROUNDS=150
	TESSERA_TEST_LONG=1 $(MAKE) -C research test evidence

# Training, privacy and evaluation on a GPU, compared with the CPU; then steps of a ViT-B/16.
test-gpu: install
	TESSERA_TEST_GPU=1 $(BIN)/python -m pytest tests/gpu tests/shared/methods/test_over_http.py \
	  tests/worker/task/test_four_bit_base.py
	$(BIN)/python -m benchmarks.steps --device cuda

# Build both images and start deploy/compose.yaml from them; as root, ten minutes; docs/deploying.md.
image-check: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt podman-compose
	$(BIN)/python -c 'import sys; from tests.support import containers; sys.exit(containers.missing())'
	TESSERA_TEST_LONG=1 $(BIN)/python -m pytest tests/deploy/test_images.py tests/deploy/test_containers.py

# dist/tessera-coordinator.oci.tar and dist/tessera-worker.oci.tar, by buildah as root; docs/deploying.md.
image-archives: install
	$(BIN)/python -m release.images

# Debian's release and mirrors are those of this system. FRESH: further options of mmdebstrap, such as a hook that sets up pip.
# Both commands of the README on a bare Debian; as root, with mmdebstrap, an hour and 10 GB.
fresh-check:
	@command -v mmdebstrap >/dev/null && test "$$(id -u)" = 0 || { echo "this needs root, and: apt-get install mmdebstrap"; exit 1; }
	mmdebstrap --variant=apt --format=null --include=python3,python3-venv,make,git $(FRESH) \
	  --customize-hook='mount -o remount,rw "$$1/proc"; echo 127.0.0.1 localhost > "$$1/etc/hosts"' \
	  --customize-hook='git clone --quiet --no-hardlinks "$(CURDIR)" "$$1/tessera"' \
	  --customize-hook='chroot "$$1" make -C /tessera demo test' \
	  "$$(. /etc/os-release && echo "$$VERSION_CODENAME")" /dev/null \
	  $(wildcard /etc/apt/sources.list /etc/apt/sources.list.d/*.sources)

# Lint and render what is deployed, by Helm itself; installs 300 MB.
deploy-check: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[deploy]'
	$(BIN)/python -m pytest tests/deploy

# Two hundred faults at real processes, a quarter of an hour; FAULTS=, SEED=.
chaos: install
	$(BIN)/python -m tests.chaos --faults $(or $(FAULTS),200) --seed $(or $(SEED),0)

# Five hundred rounds, and whether anything grows with them, ten minutes; ROUNDS=.
soak: install
	$(BIN)/python -m tests.soak --rounds $(or $(ROUNDS),500)

# A federation on one seed after the other; STEPS=, SEED=, HOURS= say how long.
simulation: install
	$(BIN)/python -m tests.model_checking --seed $(or $(SEED),0) $(if $(HOURS),--hours $(HOURS),--steps $(or $(STEPS),1000000))
	$(BIN)/python -m tests.model_checking --rules --seed $(or $(SEED),0) --steps 100000000
	$(BIN)/python -m tests.model_checking --crash-points

# All planted faults: lines that tests must catch, and behaviour that the simulation must find; half an hour.
mutants: install
	$(BIN)/python -m tests.mutants

# A million hostile updates, a quarter of an hour on one core; prints its seed.
fuzz: install
	$(BIN)/python -m tests.fuzz --cases $(or $(CASES),1000000) $(if $(SEED),--seed $(SEED))

docs: install ## the documents as a site, in docs-site/, with references made from the code
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

BENCHMARKS := rounds idle images checkpoints steps chosen_layers texts uploads page large_base simulations crowd
bench: install ## what rounds, waiting workers, steps, data and pages cost on this machine; half an hour on two cores
	$(BIN)/python -m benchmarks.memory --sizes 100
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || exit 1; done

bench-quick: install ## the same on tiny sizes; BASE=COMMIT compares CPU and bytes of rounds with it
ifdef BASE
	$(BIN)/python -m benchmarks.regression $(BASE)
else
	for name in memory $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name --quick || exit 1; done
endif

# Every method on four tasks by simulation, a quarter of an hour on a quiet core; a stopped run resumes. ONLY='--tasks text'.
bench-methods: install
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.methods $(ONLY)

migrate: install ## bring the database that TESSERA_DATABASE_URL names to head
	$(BIN)/tessera coordinator migrate

image: ## build the coordinator's and the worker's container images
	docker build --target coordinator --tag tessera-coordinator .
	docker build --target worker --tag tessera-worker .

clean: ## remove the environment and what the demo left
	rm -rf .venv demo-output bench-output build *.egg-info
