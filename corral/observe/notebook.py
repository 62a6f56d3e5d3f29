"""A run in a notebook: one display that is updated in place, with a bar, a curve and the console's lines."""

import sys
from collections.abc import Callable, Sequence
from html import escape
from importlib import import_module

WIDTH, HEIGHT = 480, 96
LAST_LINES = 200


def notebook_display() -> Callable[[str], None] | None:
    """Returns a function that shows HTML below the cell that runs, each time in place of the last. None where this is
    no notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if not hasattr(shell, "kernel"):
        return None
    ipython = import_module("IPython.display")
    handle = ipython.display(ipython.HTML(""), display_id=True)
    return lambda page: handle.update(ipython.HTML(page))


def run_html(
    title: str, step: int, num_steps: int | None, curve: str, values: Sequence[float], lines: Sequence[str] = ()
) -> str:
    """Returns the picture of a run. `curve`: name of the metric whose `values` are drawn. `lines`: of its console, of
    which the last are seen without scrolling."""
    total = "" if num_steps is None else f"/{num_steps}"
    bar = f'<progress value="{step}" max="{max(num_steps or step, 1)}" style="width: {WIDTH}px"></progress>'
    parts = [f"<div>{escape(title)}</div>", f"<div>{bar} step {step}{total}</div>"]
    if len(values) > 1:
        parts.append(curve_html(curve, values))
    if lines:
        text = escape("\n".join(lines[-LAST_LINES:]))
        style = "display: flex; flex-direction: column-reverse; max-height: 20em; overflow: auto"
        parts.append(f'<div style="{style}"><pre style="margin: 0; white-space: pre-wrap">{text}</pre></div>')
    return f"<div>{''.join(parts)}</div>"


def curve_html(name: str, values: Sequence[float]) -> str:
    """Returns a line through the values, with its name, its last value and its bounds."""
    low, high = min(values), max(values)
    scale = (HEIGHT - 4) / ((high - low) or 1.0)
    across = WIDTH / (len(values) - 1)
    points = " ".join(f"{i * across:.1f},{HEIGHT - 2 - (value - low) * scale:.1f}" for i, value in enumerate(values))
    line = f'<polyline points="{points}" fill="none" stroke="#2563eb" stroke-width="1.5"/>'
    picture = f'<svg width="{WIDTH}" height="{HEIGHT}" style="display: block">{line}</svg>'
    return f"{picture}<div>{escape(name)} {values[-1]:.3f}, from {low:.3f} to {high:.3f}</div>"
