# From a bare Debian or Ubuntu with Python 3.11 or newer: `make run` serves, `make test` proves. See README.md.

VENV   := .venv
AGENTS := .venv-agents
E2B    := .venv-e2b
DATA   := $(CURDIR)/.sandkasten
PYTHON := $(VENV)/bin/python
NEWEST := e2b e2b-code-interpreter e2b-charts ipykernel matplotlib openai-agents langchain-e2b smolagents
ARGS   ?=
LANES  ?= $(if $(ARGS),0,4)
SECONDS ?= 120

export LC_ALL := C.UTF-8
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME PYTHONWARNINGS

# Short forms of what is long by its nature: the benchmark, the attacks, the walk of the crash points, random histories
# and requests, hostile input, cut connections, the soak, a file of 5 GiB, agent frameworks and SDKs of others. The one
# that takes longest is the first.
CAMPAIGNS := $(patsubst %,tests/%.py,kernel/test_attacks e2e/test_schemathesis e2e/test_bench adapters/test_frameworks \
             e2b/test_sdks e2e/test_crash_walk sdk/test_every_byte e2e/test_soak e2e/test_state_machine \
             fuzz/test_targets sdk/test_retries kernel/test_hostile_archives \
             kernel/test_hostile_images kernel/test_layer_histories kernel/test_network_leaks kernel/test_fuzz_live)

OF_campaigns := $(CAMPAIGNS)
OF_test := $(addprefix --ignore=,tests/vm $(CAMPAIGNS))

STYLE := $(patsubst %,tests/contract/test_%.py,style layers prose)

# A start with few descriptors allowed is no reason to fail: take what the hard limit grants.
LIMITS := ulimit -S -n 65536 2>/dev/null || ulimit -S -n "$$(ulimit -H -n)" 2>/dev/null || true

.PHONY: help install run quick test campaigns vm crashwalk bench bench-full soak fuzz lint docs lock tools clean \
        as-root e2b-newest
.DELETE_ON_ERROR:

help:
	@echo 'make install            make .venv with the locked dependencies, the default image, a configuration and a key'
	@echo 'make run [ARGS=...]     serve from here (data in .sandkasten); ARGS as for `sandkasten serve`'
	@echo 'make quick [ARGS=...]   unit and actor tests beside what lint does: no root, no daemon, under a minute'
	@echo 'make test [ARGS=...]    tests of this kernel, as root, in four lanes; with ARGS as for pytest: those, in one (or LANES=N)'
	@echo 'make campaigns          the rest: short forms of benchmark, attacks, crash walk, soak, fuzzing and random requests'
	@echo 'make vm                 what is claimed of cgroup v2, on an emulated machine with a pure v2 tree and an older kernel'
	@echo 'make e2b-newest         the tests of E2B'"'"'s API with the newest SDKs and frameworks, whose versions it tells'
	@echo 'make crashwalk [ARGS=...] end processes at every crash point and look at the next start; ARGS: points'
	@echo 'make bench [ARGS=...]   measure a tenth of what bench-full does, and print (3 minutes)'
	@echo 'make bench-full         measure everything beside other runtimes, and write a report (25 minutes)'
	@echo 'make soak [ARGS=...]    cycles, kills and bad neighbours; leaves a report in docs/ (long; ARGS=--short: a minute)'
	@echo 'make fuzz [SECONDS=120] hostile input for the parsers; ARGS: names of targets'
	@echo 'make lint               types, lint, format, layers, prose'
	@echo 'make docs               the documentation as web pages, in build/site; a broken link or anchor is an error'
	@echo 'make lock               resolve the dependencies anew (needs pip-tools in .venv)'
	@echo 'make clean              remove .venv, .venv-agents, .venv-e2b* and caches; data stays'

install: as-root $(VENV)/.installed
	@$(VENV)/bin/sandkasten init --config $(DATA)/sandkasten.yaml --data-dir $(DATA)

run: as-root $(VENV)/.installed
	@$(VENV)/bin/sandkasten init --config $(DATA)/sandkasten.yaml --data-dir $(DATA) >/dev/null
	@$(LIMITS); exec $(VENV)/bin/sandkasten serve --stop-sessions --config $(DATA)/sandkasten.yaml $(ARGS)

quick: $(VENV)/.installed-dev
	@exec $(PYTHON) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'not slow and not kernel' $(STYLE) tests/unit tests/actors $(ARGS)

test campaigns: $(if $(ARGS),,as-root $(VENV)/.installed-fuzz) tools $(VENV)/.installed-dev \
		$(if $(or $(if $(ARGS),,all),$(findstring adapters,$(ARGS))),$(AGENTS)/.installed) \
		$(if $(or $(if $(ARGS),,all),$(findstring e2b,$(ARGS))),$(E2B)/.installed)
	@$(COMPILE) tests bench
	@$(LIMITS); exec $(PYTHON) tests/guardian.py $(PYTHON) -m \
		$(if $(filter 0,$(LANES)),pytest,tests.twice $(LANES)) $(or $(ARGS),$(OF_$@))

vm: tools $(VENV)/.installed-dev
	@exec $(PYTHON) -m pytest -s tests/vm $(ARGS)

# Not of `make test`: a release of theirs is no fault of a change of ours.
e2b-newest: as-root tools $(VENV)/.installed-dev
	@$(PYTHON) -m venv $(E2B)-newest && $(E2B)-newest/bin/python -m pip install -qq --upgrade $(NEWEST)
	@npm_config_ignore_scripts=true npm install --silent --no-audit --no-fund --prefix $(E2B)-newest \
		e2b@latest @e2b/code-interpreter@latest
	@touch $(E2B)-newest/.installed
	@$(E2B)-newest/bin/python -m pip list --format=freeze | grep -E '^($(shell echo $(NEWEST) | tr ' ' '|'))=='
	@npm ls --prefix $(E2B)-newest --depth=0 | tail -n +2
	@$(LIMITS); E2B_SDKS=$(E2B)-newest $(PYTHON) tests/guardian.py $(PYTHON) -m pytest tests/e2b $(ARGS) \
		|| { echo 'the newest of the versions above fail; the pinned ones count (make test ARGS=tests/e2b)'; exit 1; }

crashwalk: as-root $(VENV)/.installed-dev
	@$(LIMITS); exec $(PYTHON) tests/guardian.py $(PYTHON) -m tests.e2e.crashwalk $(ARGS)

bench-full: TOOLS += crun:crun podman:podman runsc:runsc systemd-nspawn:systemd-container
bench-full: as-root tools $(VENV)/.installed-dev
	@$(COMPILE) bench
	@$(LIMITS); exec $(PYTHON) tests/guardian.py $(PYTHON) -m bench --into docs/benchmarks $(ARGS)

bench: as-root $(VENV)/.installed-dev
	@$(COMPILE) bench
	@$(LIMITS); exec $(PYTHON) tests/guardian.py $(PYTHON) -m bench --share 0.1 $(ARGS)

soak: as-root $(VENV)/.installed-dev
	@$(LIMITS); exec $(PYTHON) tests/guardian.py $(PYTHON) -m bench.soak --report docs/soak-$$(date -u +%F).md $(ARGS)

fuzz: $(VENV)/.installed-fuzz
	@exec $(PYTHON) -m tests.fuzz --seconds $(SECONDS) $(ARGS)

lint: $(VENV)/.installed-dev
	@exec $(PYTHON) -m pytest $(STYLE) $(ARGS)

docs: $(VENV)/.installed-dev
	@exec $(PYTHON) -m mkdocs build --strict --config-file docs/site/mkdocs.yml --site-dir $(CURDIR)/build/site $(ARGS)

lock:
	@for extra in '' dev; do \
		$(PYTHON) -m piptools compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-header \
			--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --build-deps-for=editable \
			--extra server --extra mcp $${extra:+--extra $$extra} --output-file requirements$${extra:+-$$extra}.lock \
			pyproject.toml || exit 1; \
	done
	@$(PYTHON) -m piptools compile --quiet --upgrade --generate-hashes --allow-unsafe --strip-extras --no-header \
		--no-emit-index-url --no-emit-trusted-host --no-emit-find-links --build-deps-for=editable \
		--extra agents --extra langchain --extra inspect --extra anthropic \
		--output-file requirements-agents.txt pyproject.toml

clean:
	rm -rf $(VENV) $(AGENTS) $(E2B) $(E2B)-newest .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build
	find . -name __pycache__ -type d -not -path './.sandkasten/*' -prune -exec rm -rf {} +

as-root:
	$(if $(filter 0,$(shell id -u)),,$(error making sandboxes needs root: run `sudo make`, or be root in a virtual machine))
	@:

$(VENV)/.installed: requirements.lock pyproject.toml
	@$(call environment)
	@$(call packages,requirements.lock)
	@touch $@

$(VENV)/.installed-dev: requirements-dev.lock $(VENV)/.installed
	@$(call packages,requirements-dev.lock)
	@touch $@

$(VENV)/.installed-fuzz: requirements-fuzz.txt $(VENV)/.installed-dev
	@echo 'installing requirements-fuzz.txt'; \
		$(PYTHON) -m pip install -qq --require-hashes --only-binary :all: -r requirements-fuzz.txt \
		|| echo 'atheris has no wheel for this machine'
	@touch $@

# Agent frameworks, whose versions are theirs, for tests/adapters alone, which skips where they can't be had.
$(AGENTS)/.installed: VENV := $(AGENTS)
$(AGENTS)/.installed: PYTHON := $(AGENTS)/bin/python
$(AGENTS)/.installed: requirements-agents.txt pyproject.toml
	@( $(call environment) ) && ( $(call packages,requirements-agents.txt) ) && touch $@ \
		|| echo 'tests/adapters skips: the agent frameworks can not be installed'

# E2B's SDKs as published, for tests/e2b alone, which skips where they can't be had.
$(E2B)/.installed: VENV := $(E2B)
$(E2B)/.installed: PYTHON := $(E2B)/bin/python
$(E2B)/.installed: requirements-e2b.txt tests/e2b/package-lock.json
	@( $(call environment) ) && echo 'installing $<' \
		&& $(PYTHON) -m pip install -qq --require-hashes --only-binary :all: -r $< \
		&& { cp tests/e2b/package.json tests/e2b/package-lock.json $(E2B); \
			npm_config_ignore_scripts=true npm ci --silent --no-audit --no-fund --prefix $(E2B) \
			|| echo 'tests/e2b skips JavaScript: its SDK can not be installed'; touch $@; } \
		|| echo 'tests/e2b skips: the SDKs can not be installed'

# An environment whose interpreter works is kept. Debian ships Python without ensurepip: as root that is mended.
define environment
	$(PYTHON) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && exit 0; \
	for python in python3 python3.14 python3.13 python3.12 python3.11 none; do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	done; \
	[ "$$python" != none ] || { echo 'Python 3.11 or newer is needed: apt-get install python3' >&2; exit 1; }; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
		package="$$("$$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; \
		[ "$$(id -u)" = 0 ] || { echo "run this first: sudo apt-get install $$package" >&2; exit 1; }; \
		$(call apt,$$package) || { echo "$$package can't be installed; $$python needs its ensurepip" >&2; exit 1; }; \
	fi; \
	rm -rf $(VENV); echo "making $(VENV) with $$("$$python" --version)"; exec "$$python" -m venv $(VENV)
endef

# nsinit writes no bytecode (-B), and compiles at each start what has changed since: a third of the start's time.
COMPILE = $(PYTHON) -m compileall -q sandkasten nsinit runner egress

define packages
	echo 'installing $(1)'; \
	$(PYTHON) -m pip install -qq --require-hashes --only-binary :all: -r $(1) \
	&& $(PYTHON) -m pip install -qq --no-deps --no-build-isolation --editable . \
	&& $(COMPILE)
endef

define apt
	{ DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(1) >/dev/null 2>&1 \
	|| { apt-get update -qq >/dev/null 2>&1 \
	&& DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(1) >/dev/null 2>&1; }; }
endef

# What some tests compare with. They skip, and say why, where a tool is missing.
TOOLS := ip:iproute2 busybox:busybox-static dash:dash bwrap:bubblewrap runc:runc mmdebstrap:mmdebstrap curl:curl \
         qemu-system-x86_64:qemu-system-x86 vim:vim chromium:chromium systemd-analyze:systemd \
         mkfs.btrfs:btrfs-progs mkfs.xfs:xfsprogs psql:postgresql-client redis-cli:redis-tools nft:nftables

tools:
	@missing=''; \
	for pair in $(TOOLS); do \
		PATH="$$PATH:/usr/sbin:/sbin" command -v "$${pair%%:*}" >/dev/null || missing="$$missing $${pair#*:}"; \
	done; \
	[ -z "$$missing" ] || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null \
	|| { echo "installing$$missing"; for package in $$missing; do $(call apt,$$package) || echo "no $$package to be had"; done; }
