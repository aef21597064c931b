"""``gradacc-fused``: doctor, demo, floor, bench. Needs the ``cli`` extra; demo and bench also the ``demo`` extra."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from .errors import BackendUnavailableError

DEMO_MODEL = "gradacc_fused.demo.model:GPT"


class Dtype(str, Enum):
    """Dtypes of parameters and gradients."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"


class BenchDtype(str, Enum):
    """Dtypes to measure parameters in."""

    as_is = "as-is"
    bfloat16 = "bfloat16"
    float32 = "float32"


class UpdateRule(str, Enum):
    """Update rules with a floor."""

    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"
    sgd_momentum = "sgd_momentum"
    lion = "lion"


class Closing(str, Enum):
    """What becomes of a window's last sum: see floor.floor."""

    unstored = "unstored"
    stored = "stored"
    reduced = "reduced"


def _missing(extra: str, error: ImportError) -> SystemExit:
    return SystemExit(f"gradacc-fused needs {error.name}. Run: pip install 'gradacc_fused[{extra}]'")


def _doctor() -> None:
    import platform

    import torch
    from rich.console import Console
    from rich.table import Table

    from . import __version__
    from .backends import registry

    console = Console()
    table = Table(title=f"gradacc_fused {__version__}", title_justify="left")
    for column in ("backend", "available", "devices", "reason"):
        table.add_column(column, overflow="fold")
    for status in registry.backends().values():
        available = "[green]yes[/green]" if status.available else "[red]no[/red]"
        table.add_row(status.name, available, ", ".join(status.devices), status.reason)
    console.print(table)
    chosen = registry.choose(torch.device("cpu")).__name__.rpartition(".")[2]
    console.print(f"CPU tensors run on '{chosen}'" + _instruction_set())
    console.print(
        f"torch {torch.__version__} (CUDA {torch.version.cuda or 'not built in'}), Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads"
    )


def _instruction_set() -> str:
    try:
        from . import _C
    except ImportError:
        return ""
    return f", instruction set {_C.isa()}"


def _app():
    import typer

    app = typer.Typer(no_args_is_help=True, add_completion=False, help="Exact, fused gradient accumulation.")

    @app.command()
    def doctor() -> None:
        """Say which backends are available here, and why the others are not."""
        _doctor()

    @app.command()
    def demo(
        windows: int = typer.Option(60, min=2, help="Real steps of each of the three trainings."),
        output: Path = typer.Option(Path("demo_output"), help="Folder for the loss-curve picture."),
        seed: int = typer.Option(0, help="Seed of the model and of the order of the text."),
        repeats: int = typer.Option(15, min=1, help="Windows timed."),
    ) -> None:
        """Train a small GPT on whole batches, with our window and with the usual loop, and compare."""
        try:
            from .demo.report import run
        except ImportError as error:
            raise _missing("demo", error) from error
        run(windows, output, seed, repeats)

    @app.command()
    def bench(
        model: str = typer.Option("", help="module:callable that returns a module or parameters; else the demo's GPT."),
        k: int = typer.Option(4, min=1, help="Micro-batches in a window."),
        defer: str = typer.Option("1", help="Micro-batches whose gradients may be held: a number or auto."),
        optimizer: UpdateRule = typer.Option(UpdateRule.adamw, help="Update rule."),
        dtype: BenchDtype = typer.Option(BenchDtype.as_is, help="Dtype to measure the parameters in."),
        output: Path = typer.Option(Path("bench_output"), help="Folder for the picture and the CSV."),
        seconds: float = typer.Option(3.0, min=0.0, help="Go on repeating for this long."),
    ) -> None:
        """Measure the passes of a window on your own parameters, beside torch's and the floor."""
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise _missing("demo", error) from error
        from .report import bench as report
        from .report import model as models

        try:
            params = models.parameters(models.load(model or DEMO_MODEL), models.dtype_of(dtype.value))
            report.run(params, k, models.defer_of(defer), optimizer.value, seconds, output)
        except (models.ModelError, BackendUnavailableError) as error:
            raise SystemExit(f"gradacc-fused bench: {error}") from error

    @app.command()
    def floor(
        k: int = typer.Option(8, min=1, help="Micro-batches in a window."),
        m: int = typer.Option(1, min=1, help="Micro-batches whose gradients may be held (defer)."),
        elements: int = typer.Option(124_439_808, min=1, help="Elements of all parameters together."),
        grad_dtype: Dtype = typer.Option(Dtype.bfloat16, help="Of the gradients."),
        param_dtype: Dtype = typer.Option(Dtype.bfloat16, help="Of the parameters."),
        rule: UpdateRule = typer.Option(UpdateRule.adamw, help="Update rule."),
        closing: Closing = typer.Option(Closing.unstored, help="What becomes of the window's last sum."),
    ) -> None:
        """Print the bytes and launches that a window cannot do without, pass by pass, and what others move."""
        import torch

        from .report.floor_table import show

        show(
            k, m, elements, getattr(torch, grad_dtype.value), getattr(torch, param_dtype.value), rule.value,
            closing.value,
        )  # fmt: skip

    return app


def main() -> None:
    """Entry point of the ``gradacc-fused`` command."""
    try:
        app = _app()
    except ImportError as error:
        raise _missing("cli", error) from error
    app()


if __name__ == "__main__":
    main()
