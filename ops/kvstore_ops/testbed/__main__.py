"""Training and measuring a testbed model: `python -m kvstore_ops.testbed train|evaluate|list`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from kvstore.errors import InvalidRequest
from kvstore_ops.testbed import store
from kvstore_ops.testbed.models import RECIPES, recipe
from kvstore_ops.testbed.seeds import calibration, evaluation

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command("list")
def show() -> None:
    """List the models that have recipes, and mark those that are not shipped."""
    shipped = store.shipped()
    for name, made in RECIPES.items():
        start = f" from {made.start}" if made.start else ""
        print(f"{name:16} {made.layers:2} layers, seed {made.seed}{start}{'' if name in shipped else ' (not shipped)'}")


@app.command()
def train(
    name: str,
    runs: Annotated[Path, typer.Option(help="Where checkpoints lie; a run found there goes on.")] = Path(
        "testbed-runs"
    ),
    target: Annotated[Path, typer.Option(help="Where the finished weights go.")] = store.WEIGHTS,
) -> None:
    """Train a model to the end of its recipe, from its last checkpoint if there is one."""
    from kvstore_ops.testbed.train import train as run

    made = recipe(name)
    start = store.tensors(made.start) if made.start else None
    runs.mkdir(parents=True, exist_ok=True)
    net = run(made, runs / f"{name}.safetensors", start, lambda line: print(line, flush=True))
    store.export(made, dict(net.named_parameters()), target)
    print(f"{name}: weights in {target / name}")


@app.command()
def evaluate(
    name: str,
    contexts: Annotated[int, typer.Option(help="How many contexts, a multiple of the number of seeds.")] = 256,
    report: Annotated[
        bool, typer.Option(help="On the evaluation seeds: for a figure to publish, never to tune.")
    ] = False,
) -> None:
    """Measure the accuracy of full prefill, with its standard error."""
    from kvstore_ops.testbed import evaluate as measure

    model, made = store.load(name)
    seeds = evaluation() if report else calibration()
    found = measure.contexts(seeds, contexts)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=contexts)
        score = measure.full_prefill(model, found, made.answers, lambda done: progress.update(task, completed=done))
    print(f"{name}: full prefill {score} on {seeds.purpose} seeds")


def main() -> None:
    """Run the command. An InvalidRequest is printed as one line."""
    try:
        app()
    except InvalidRequest as error:
        raise SystemExit(f"testbed: {error.message}") from None


if __name__ == "__main__":
    main()
