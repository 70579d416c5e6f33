"""Views of a workflow, for people who look while and after it runs.

    journal ──▶ overview_jobs ──▶ JobView ─┬─▶ tables of `watch` and `jobs`, and `logs`
                                           ├─▶ make_picture ──▶ pipeline and timeline, for MLflow
                                           └─▶ usage_by_rule ──▶ report, and what to request next

They read the journal without its lock, beside a running controller, which asks the sites anyway.
Without a controller, `sites` asks them, and only when the user wants it. Rendering is pure.
"""

from collections.abc import Mapping

from .picture import Picture, render_template
from .pipeline import render_pipeline
from .timeline import render_timeline

__all__ = ["render_files", "render_pipeline", "render_timeline"]


def render_files(picture: Picture) -> Mapping[str, str]:
    """Draw the pictures of a workflow, each as an HTML page; return them (UTF-8) by file name.

    MLflow's artifact view shows HTML in a frame, with tooltips and scrolling; it shows SVG as a
    mere image. Each file is self-contained: it has no script and fetches nothing. All names are
    escaped.
    """
    drawn = {"pipeline": render_pipeline(picture), "timeline": render_timeline(picture)}
    return {
        f"{what}.html": render_template("page.html.j2", picture=picture, what=what, svg=svg)
        for what, svg in drawn.items()
    }
