"""Pictures of the studies: curves on log axes and grouped bars, machine and versions in the title."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Points = Sequence[tuple[float, float]]
MARKERS = "osD^vPX*"
STYLES = ("-", "--", ":", "-.")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(f"bench needs {error.name}. Run: pip install 'gradacc_fused[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def colours(labels: Sequence[str]) -> dict[str, Any]:
    """Shades of blue for our paths, of orange for stock torch's, of grey for the rest; the first is the darkest."""
    pyplot = _pyplot()
    families: dict[str, list[str]] = {}
    for label in labels:
        family = "Blues" if label.startswith("ours") else "Oranges" if label.startswith("stock") else "Greys"
        families.setdefault(family, []).append(label)
    return {
        label: pyplot.get_cmap(family)(0.9 - 0.5 * number / max(1, len(members) - 1))
        for family, members in families.items()
        for number, label in enumerate(members)
    }


def compact(number: float) -> str:
    """10000 -> 10k, 5e8 -> 500M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:g}{suffix}"
    return f"{number:g}"


def curves(
    file: Path, title: str, subtitle: str, x_label: str, y_label: str, series: Mapping[str, Points],
    log_x: bool = True,
) -> Path:  # fmt: skip
    """Draw one line per series on log axes.

    Args:
        file: PNG to write; its folder is made.
        title: First line of the title.
        subtitle: Second line: machine and versions.
        x_label: What x is, with its unit.
        y_label: What y is, with its unit.
        series: Label -> points (x, y). "path: part" is drawn in the colour of "path", as a broken line. Points at
            y <= 0 cannot be drawn on a log axis and are left out.
        log_x: Whether x has a log axis too.
    """
    pyplot = _pyplot()
    from matplotlib.ticker import FuncFormatter, LogFormatter, NullLocator

    figure, axes = pyplot.subplots(figsize=(8, 5))
    paths = list(dict.fromkeys(label.partition(": ")[0] for label in series))
    parts = list(dict.fromkeys(label.partition(": ")[2] for label in series))
    shades = colours(paths)
    for label, points in series.items():
        path, _, part = label.partition(": ")
        drawn = [(x, y) for x, y in points if y > 0]
        axes.plot(
            [x for x, _ in drawn], [y for _, y in drawn], label=label, color=shades[path], linewidth=1.8, markersize=5,
            marker=MARKERS[paths.index(path) % len(MARKERS)], linestyle=STYLES[parts.index(part) % len(STYLES)],
        )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.4)))
    if log_x:
        axes.set_xscale("log")
    ticks = sorted({x for points in series.values() for x, _ in points})
    axes.set_xticks(ticks, [compact(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(which="both", alpha=0.25)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.legend(fontsize=8)
    return _finish(pyplot, figure, file, title, subtitle)


def bars(
    file: Path, title: str, subtitle: str, y_label: str, groups: Sequence[str],
    series: Mapping[str, Sequence[float]], whiskers: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Path:  # fmt: skip
    """Draw one panel of bars per group, each with a linear axis of its own that begins at 0.

    Args:
        file: PNG to write; its folder is made.
        title: First line of the title.
        subtitle: Second line: machine and versions.
        y_label: What the height is, with its unit.
        groups: Titles of the panels.
        series: Label -> one height per group.
        whiskers: Label -> (low, high) per group.
    """
    pyplot = _pyplot()
    shades = colours(list(series))
    figure, panels = pyplot.subplots(1, len(groups), figsize=(max(8.5, 3.5 * len(groups)), 4.5), squeeze=False)
    for number, (group, axes) in enumerate(zip(groups, panels[0], strict=True)):
        heights = [values[number] for values in series.values()]
        drawn = axes.bar(range(len(series)), heights, 0.75, color=[shades[label] for label in series])
        axes.bar_label(drawn, [f"{height:.3g}" for height in heights], fontsize=8, padding=2)
        for x, label in enumerate(series):
            if whiskers:
                axes.plot([x + 0.3, x + 0.3], whiskers[label][number], color="black", linewidth=1)
        axes.set_xticks(range(len(series)), [label.replace(", ", "\n") for label in series], fontsize=8)
        axes.set_title(group, fontsize=9)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        axes.margins(y=0.1)
    panels[0][0].set_ylabel(y_label)
    return _finish(pyplot, figure, file, title, subtitle)


def _finish(pyplot: Any, figure: Any, file: Path, title: str, subtitle: str) -> Path:
    figure.suptitle(f"{title}\n{subtitle}", fontsize=9)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return file
