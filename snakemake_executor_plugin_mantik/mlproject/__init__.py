"""Run entry points of MLproject files as rules of a Snakefile.

    from snakemake_executor_plugin_mantik import mlproject

    project = mlproject.load("churn")

    module mantik:
        snakefile: mlproject.RULE

    use rule mlproject from mantik as train with:
        input: data="data/train.csv"
        output: model="models/{alpha}.pkl"
        params: **project.entry_point("train", data="{input.data}", alpha="{wildcards.alpha}")

See docs/mlproject.md.
"""

from .entry import Call, read_call
from .project import RULE, Project, load

__all__ = ["RULE", "Call", "Project", "load", "read_call"]
