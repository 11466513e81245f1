"""`python -m batonq.worker`: the same as `batonq worker`."""

import typer

from batonq.worker.cli import worker

if __name__ == "__main__":
    typer.run(worker)
