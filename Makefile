# Needs make and Python 3.11 or later (PYTHON=python3.12 chooses another one). Everything else is made here: nox in
# .venv, and what nox needs in .nox.
PYTHON ?= python3
NOX = .venv/bin/nox

.PHONY: docs test live clean

docs: $(NOX)  ## build the site into build/html
	$(NOX) -s docs

test: $(NOX)  ## run the tests
	$(NOX) -s tests

live: $(NOX)  ## serve the site and rebuild it when a source changes
	$(NOX) -s site

clean:  ## remove everything that was made, the environments too
	rm -rf .venv .nox build dist docs/auto_downloads docs/auto_examples .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(NOX): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Fusebook needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=/path/to/a/newer/python")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check "nox>=2026.4"
	@touch $@
