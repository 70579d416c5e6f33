"""Make a rule's own directory for temporary files (`resources: tmpdir`) on the node.

Snakemake makes the directory where the job runs. A variable in its name is the node's: those of a
scheduler (`$SLURM_JOB_ID`) and of a site (`$SCRATCH`) exist nowhere else.
"""

import re

_VARIABLE = re.compile(r"\$(?:(?P<bare>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})")


def make_tmpdir_code(text: str, workspace: str, fail: str) -> str:
    """Return bash that sets TMPDIR to the directory `text`, as an absolute path, and makes it.

    Variables and a leading `~` are expanded. `workspace` is a word of bash; `fail` is a bash
    command that ends the job or member, with `{}` for its message.
    """
    text = re.sub(r"^~(?=/|$)", "${HOME}", text)
    names = dict.fromkeys(found["bare"] or found["braced"] for found in _VARIABLE.finditer(text))
    words, end = [], 0
    for found in _VARIABLE.finditer(text):
        words += [_quote(text[end : found.start()]), f'"${found["bare"] or found["braced"]}"']
        end = found.end()
    words.append(_quote(text[end:]))
    lines = []
    for name in names:
        lacking = f'"the resource tmpdir names {name}, a variable that this node does not set"'
        lines.append(f'[ -n "${{{name}-}}" ] || {fail.replace("{}", lacking)}')
    unmade = '"the directory $TMPDIR of the resource tmpdir cannot be made on this node"'
    return "\n".join(
        [
            *lines,
            f"TMPDIR={''.join(words)}",
            f"case $TMPDIR in (/*) ;; (*) TMPDIR={workspace}/$TMPDIR ;; esac",
            f'mkdir -p -- "$TMPDIR" || {fail.replace("{}", unmade)}',
        ]
    )


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'" if text else ""
