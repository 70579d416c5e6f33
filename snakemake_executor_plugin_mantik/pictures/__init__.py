"""Draw a workflow: its pipeline and its jobs' timeline, each as an HTML file.

These are pure functions of a `Picture`. MLflow's artifact view shows HTML in a frame, with tooltips
and scrolling; it shows SVG as a mere image.
"""

from collections.abc import Mapping

from .pipeline import render_pipeline
from .timeline import render_timeline
from .value import (
    Node,
    NodeState,
    Picture,
    count_states,
    format_timestamp,
    render_template,
    text_line,
)

__all__ = ["Node", "NodeState", "Picture", "render_files", "render_pipeline", "render_timeline"]


def render_files(picture: Picture) -> Mapping[str, str]:
    """Draw the pictures of a workflow; return their texts (UTF-8) by file name.

    Each file is self-contained: it has no script and fetches nothing. All names are escaped.
    """
    return {
        "pipeline.html": _page(picture, "pipeline", render_pipeline(picture)),
        "timeline.html": _page(picture, "timeline", render_timeline(picture)),
    }


def _page(picture: Picture, what: str, svg: str) -> str:
    return render_template(
        "page.html.j2",
        title=f"{text_line(picture.title)}: {what}",
        states=count_states(node.state for node in picture.nodes),
        caption=f"as of {format_timestamp(picture.now)}",
        svg=svg,
    )
