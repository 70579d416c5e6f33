"""Load the bash templates of this package."""

from functools import cache

import jinja2


@cache
def load_template(name: str) -> jinja2.Template:
    """Load the template `name`; callers must quote its values for bash."""
    return _environment().get_template(name)


@cache
def _environment() -> jinja2.Environment:
    # Jinja's default delimiters occur in bash: `${#array[@]}` would begin a comment.
    return jinja2.Environment(  # noqa: S701 - bash, not HTML; values are quoted for bash
        variable_start_string="@{",
        variable_end_string="}@",
        block_start_string="@%",
        block_end_string="%@",
        comment_start_string="@#",
        comment_end_string="#@",
        line_statement_prefix="@@",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        loader=jinja2.PackageLoader(__package__, "bash"),
    )
