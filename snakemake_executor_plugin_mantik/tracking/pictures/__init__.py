"""Pictures of a workflow: its pipeline and its jobs' timeline, each one HTML file.

Pure functions of a `Picture`. MLflow's artifact view shows HTML in a frame, where the mouse finds
titles and large pictures can be scrolled; it shows SVG as a mere image.
"""

from collections.abc import Mapping

from snakemake_executor_plugin_mantik.tracking.pictures.pipeline import render_pipeline
from snakemake_executor_plugin_mantik.tracking.pictures.text import (
    count_states,
    format_timestamp,
    render_template,
    text_line,
)
from snakemake_executor_plugin_mantik.tracking.pictures.timeline import render_timeline
from snakemake_executor_plugin_mantik.tracking.pictures.value import Node, NodeState, Picture

__all__ = ["Node", "NodeState", "Picture", "render_files", "render_pipeline", "render_timeline"]


def render_files(picture: Picture) -> Mapping[str, str]:
    """The pictures of a workflow: the names of files, and their texts (UTF-8).

    Each is whole by itself: no script, nothing that is fetched. What comes from names is escaped.
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
        told=f"as of {format_timestamp(picture.now)}",
        svg=svg,
    )
