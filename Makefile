# Every target makes .venv first if it is missing. Needs git, make and Python 3.11.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PYTHONWARNINGS := ignore::DeprecationWarning,ignore::SyntaxWarning

.PHONY: help repro ladder gpu gpu-pack test test-long lab bench links storm lint lock
.DEFAULT_GOAL := help

help:                ## name the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1	\2/p' Makefile

repro: .venv/.done  ## reproduce every table and figure at the scale of params.yaml
	dvc repro
	python -m pipelines.index --times

ladder: .venv/.done  ## the evidence: sizes x methods x seeds, tuned; about three days from nothing, resumable, done points are in git
	dvc repro results/ladder/dvc.yaml

gpu-pack: .venv/.done ## pack what `make gpu` wants beside the source, from what `make ladder` has prepared
	python -m pipelines.ladder prepare
	python -m pipelines.gpu pack

gpu:                 ## on a GPU's machine, where nothing is installed: kernels, ranks, speed, points of the ladder
	PYTHONPATH=$(CURDIR) python3 -m pipelines.gpu

# More workers than cores, as many tests wait for links and timeouts; with bytecode, as they start hundreds of processes.
test test-long: WORKERS = $$(python -c 'import os; print(2 * os.cpu_count())')
test test-long: export PYTHONDONTWRITEBYTECODE :=
test: .venv/.done   ## lint, the import contract, pytest, and every notebook at smoke scale
	ruff check . && ruff format --check . && lint-imports --no-cache
	python -m pytest -n $(WORKERS) --dist worksteal -m 'not longest'
	python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --nbval-lax --nbval-kernel-startup-timeout 300 \
		notebooks -p no:cacheprovider

test-long: .venv/.done ## the tests that take a minute or more each: processes that are killed, a ladder, the graph of stages
	python -m pytest -n $(WORKERS) --dist worksteal -m longest

lab: .venv/.done    ## explore in JupyterLab, which opens at the root of the checkout, on an index
	jupyter lab --notebook-dir=. $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/index.ipynb

links: .venv/.done  ## methods over links that the kernel shapes, beside replays and the ledger (Linux, root)
	python -m pipelines.links measure
	dvc repro real_links && python -m pipelines.index

storm: .venv/.done  ## half an hour of killed, stopped and cut replicas beside as long a calm, and kills on the way to a loss
	python -m pipelines.storm measure
	python -m pipelines.kills measure
	python -m pipelines.faults
	dvc repro real_faults && python -m pipelines.index

bench: .venv/.done  ## ratios against bare PyTorch, side by side
	python -m pipelines.bench

lint: .venv/.done   ## format code and clean notebooks
	ruff check --fix . && ruff format .
	python -m pipelines.clean

lock: .venv/.done   ## renew constraints.txt from what is installed
	pip freeze --exclude-editable | sed 's/+cpu//' > constraints.txt

.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v == (3, 11) or sys.exit("lowcomm needs Python 3.11, found %d.%d; set PYTHON=" % v)'
	test -d .venv || $(PYTHON) -m venv .venv
	.venv/bin/pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	.venv/bin/python -m compileall -qq -j 0 .venv/lib || true # on all cores, unlike pip; some templates are no modules
	echo '$(CURDIR)' > $$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/checkout.pth # pipelines/
	touch $@
