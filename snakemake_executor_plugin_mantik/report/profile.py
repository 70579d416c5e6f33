"""Write advice as a profile of Snakemake."""

from collections.abc import Sequence
from io import StringIO

from ruamel.yaml import YAML

from .usage import RuleUsage

_HEAD = """\
# What to request next time, by what jobs have used: smk-mantik report --profile wrote it.
#   snakemake --profile DIRECTORY-OF-THIS-FILE ...
# or copy it to a profile of yours. Memory is in MB, runtime in minutes. These values replace those
# of the rules, also where a rule computes them: a retry does not get more.
"""


def render_profile(rules: Sequence[RuleUsage]) -> str:
    """Return the text of a profile (`config.yaml`) that sets what is advised."""
    values: dict[str, dict[str, int]] = {}
    words = []
    for usage in sorted(rules, key=lambda one: one.rule):
        if usage.advice:
            values[usage.rule] = {advice.resource: advice.value for advice in usage.advice}
            words += [f"# {usage.rule}: {advice.words}\n" for advice in usage.advice]
    if not values:  # Snakemake refuses an empty set-resources
        return f"{_HEAD}# There is nothing to change.\n{{}}\n"
    text = StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump({"set-resources": values}, text)
    return f"{_HEAD}{''.join(words)}{text.getvalue()}"
