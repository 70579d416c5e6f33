"""Write a job's script: its data, and a call of the library (`bash/*.sh`), which does the rest.

All text from the user is quoted for bash, except the options of Apptainer. These use bash's quotes
themselves: `$NAME`, `${NAME}` and `~/` at the beginning of a word are expanded on the node, and
nothing else is.
"""

import base64
import gzip
import hashlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..common.errors import UserError
from . import packs
from .library import SUM_DIGITS, library_checksum, library_path
from .paths import UPS, bundle_done_path, bundle_path, workspace_root, workspace_top
from .quoting import (
    encode_text,
    expands,
    path_argument,
    quote_expandable,
    quote_expanded,
    quote_paths,
    quote_word,
    quote_words,
    shell_quote,
)
from .segments import START_MARK
from .spec import Container, Environment, JobSpec, Segment

PREDECESSORS: Final = "predecessors"
CHECKPOINT: Final = "checkpoint"

STEPS: Final = (
    "workspace",  # enter the workspace
    PREDECESSORS,  # check that the attempts that make inputs have succeeded
    "secrets",  # read and remove the file of secrets
    "bundles",  # unpack uploaded and inline bundles
    "inputs",  # check that all inputs have the content that the job was submitted for
    "outputs",  # remove old outputs, make directories for new ones
    CHECKPOINT,  # look at the checkpoint of the segment before
    "modules",
    "variables",
    "before",  # run the user's commands before the job, on the compute node
    "python",  # make and activate the virtual environment
    "temporary",  # set the variables for temporary files
    "image",  # find Apptainer and its image
    "container",  # find srun, and start the container with it
    "own",  # set up the rule's own environment; the command reports this in MANTIK_STATE
)
"""The steps before the command, in order, except that variables are set before modules are loaded;
a marker names the one that failed."""

PART_BYTES: Final = 100_000
"""A longer part of a job's data, such as its list of inputs or its command, is a file: Linux
takes no argument of 128 KiB or more (MAX_ARG_STRLEN), and Slurm no script of more than 4 MiB."""

VARIABLE_BYTES: Final = 131_000
"""A longer variable would keep the job from starting any program (Linux, MAX_ARG_STRLEN)."""

BASH_OWN: Final = frozenset(
    """
    BASH BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND
    BASH_EXECUTION_STRING BASH_LINENO BASH_MONOSECONDS BASH_REMATCH BASH_SOURCE BASH_SUBSHELL
    BASH_TRAPSIG BASH_VERSINFO BASH_VERSION COMP_WORDBREAKS DIRSTACK EPOCHREALTIME
    EPOCHSECONDS EUID FUNCNAME GROUPS HISTCMD IFS LINENO OLDPWD OPTARG OPTERR OPTIND
    PIPESTATUS PPID PS1 PS2 PWD RANDOM SECONDS SHELLOPTS SHLVL SRANDOM UID _
    """.split()  # noqa: SIM905 - one name a word
)
"""Variables that bash sets in every process that it starts: the command would not see the user's
value, and read-only ones would end the job (tried with bash 5.2)."""

_MONITOR: Final = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"

VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\$(?:(?P<bare>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})")

_HEAD = """\
#!/bin/bash
# Job: {title}
#
# Runs one attempt of a job for the mantik executor of Snakemake. What follows is its data; what all
# jobs do is in the library in the workspace that the last lines read.
"""
_TAIL = """\
_m_site_job=${{_m_pooled:-${{PWD##*/}}}}
_m_library={library}
_m_whole() {{ [[ $(sha256sum $_m_library 2> /dev/null) == {checksum}* ]] && _m_found=yes; }}
cd -- "$_m_workspace" && until _m_whole || (( SECONDS >= _m_visible_s )); do sleep 0.2; done
if [ "${{_m_found-}}" ] && . ./$_m_library; then
  _m_main
  exit 1
fi
echo "mantik: no whole $_m_library in $_m_workspace: the job did not start" >&2
exit 0  # the workspace was purged: the job is submitted again
"""


@dataclass(frozen=True)
class Script:
    """What runs an attempt: the script to submit, and what must be in the workspace before it.

    Attributes:
        text: bash.
        beside: by path, what is too long for it.
    """

    text: str
    beside: Mapping[str, bytes]


def render_script(spec: JobSpec) -> Script:
    """Write the bash script that runs the attempt `spec`; the same spec gives the same script.

    Raises `UserError` for a NUL character, an invalid name of a variable, and a variable of more
    than `VARIABLE_BYTES`.
    """
    head = _HEAD.format(title=" ".join(spec.name.split())[:200])
    parts = [part for part in _data(spec) if part]
    long = [part for part in parts if len(encode_text(part, "the job")) > PART_BYTES]
    beside = _beside(long, spec) if long else {}
    lines = [part for part in parts if part not in long]
    lines.append(_array("lists", quote_words(beside, "")))
    if spec.inline:
        lines.append(
            f"_m_inline() {{\n  base64 -d <<'_M_INLINE'\n{_base64(spec.inline)}_M_INLINE\n}}"
        )
    tail = _TAIL.format(library=library_path(), checksum=library_checksum())
    text = "\n".join([head, *filter(None, lines), "", tail])
    return Script(text, beside)


def _beside(parts: Sequence[str], spec: JobSpec) -> dict[str, bytes]:
    """Return the files that hold parts of the data, compressed; their paths have its checksum."""
    content = encode_text("".join(f"{part}\n" for part in parts), "the job")
    packed = gzip.compress(content, mtime=0)
    path = spec.paths.lists(hashlib.sha256(content).hexdigest())
    most = spec.limits.upload_bytes
    starts = range(0, len(packed), most)
    return {f"{path}.{n}": packed[at : at + most] for n, at in enumerate(starts)}


def _data(spec: JobSpec) -> Iterator[str]:
    paths, limits, environment = spec.paths, spec.limits, spec.environment
    yield _set("workspace", spec.workspace)
    if workspace_root(spec.workspace) != spec.workspace:
        yield f"_m_ups=({' '.join(map(str, UPS))})"
    yield _set("attempt", paths.attempt_id)
    yield _set("attempts", paths.attempts)
    yield _set("claim", paths.claim)
    yield _set("work", paths.work)
    yield _set("identity", spec.identity) or "_m_identity="
    yield f"_m_term={spec.term}"
    yield f"_m_own_umask={'027' if spec.shared else '077'}"
    yield _set("umask", "" if spec.umask is None else f"{spec.umask:04o}")
    yield (
        f"_m_heartbeat_s={limits.heartbeat_s} _m_grace_s={limits.grace_s}"
        f" _m_visible_s={limits.visible_s}"
    )
    yield (
        f"_m_marker_bytes={limits.marker_bytes} _m_archive_file_bytes={limits.archive_file_bytes}"
        f" _m_log_tail_bytes={limits.log_tail_bytes}"
    )
    yield from _files(spec)
    yield from _environment(environment, spec)
    yield _array("before", quote_words(environment.before_on_compute, "a command"))
    yield _set("always_zero", "yes" if environment.after_on_login else "")
    if spec.segment is not None:
        yield from _segment(spec.segment)
    if spec.live is not None:
        yield _set_path("live", spec.live.path)
        yield _set("growing", spec.live.growing)
        yield (
            f"_m_live_s={limits.live_s} _m_live_file_bytes={limits.live_file_bytes}"
            f" _m_live_bytes={limits.live_bytes}"
            f" _m_pack_bytes={packs.PACK_BYTES} _m_piece_bytes={packs.PIECE_BYTES}"
        )
    if spec.resources.gpus_per_node:
        yield "_m_gpus_wanted=yes"
        yield _set_path("gpu_metrics", _gpu_metrics(spec))
    if spec.benchmark is not None:
        yield _set_path("benchmark", spec.benchmark.path)
        yield _set_path("benchmark_file", spec.benchmark.file)
    yield _set("shell", spec.shell)
    commands = spec.benchmark.commands if spec.benchmark is not None else (spec.command,)
    yield _array("commands", quote_words(commands, "the command"))
    yield _array("after", quote_words(environment.after_on_compute, "a command"))
    if spec.live is None and spec.benchmark is None and not environment.requirements:
        yield "_m_brief=yes"


def _files(spec: JobSpec) -> Iterator[str]:
    yield _rows(
        "inputs",
        (
            f"{'/' if file.directory else '-' if file.size is None else file.size} "
            f"{file.sha256[:SUM_DIGITS] or '-'}{'+' if file.changed else ''} "
            f"{quote_paths([file.path], 'an input')}"
            for file in spec.inputs
        ),
        "size, checksum and path",
    )
    yield _set("moved", " ".join(str(3 * n) for n, file in enumerate(spec.inputs) if file.moved))
    yield _rows(
        "numbers",
        (f"{n} {quote_paths([path], 'an input')}" for path, n in sorted(spec.numbers.items())),
        "of contents that may arrive late",
    )
    yield _rows(
        "outputs",
        (
            f"{file.kind} {'d' * file.directory + 'k' * file.keep + 's' * file.stored or '-'}"
            f" {quote_paths([file.path], 'an output')}"
            for file in spec.outputs
        ),
        "kind, flags and path",
    )
    yield _rows(
        "predecessors",
        (
            f"{one.code} {shlex.quote(f'./{one.paths.claim}')} {len(one.makes)}"
            f" {quote_paths(one.makes, 'an input')}"
            for one in spec.after
        ),
        "code, claim, and the inputs that each makes",
    )
    yield _rows(
        "bundles",
        (quote_words((bundle_path(name), bundle_done_path(name)), "") for name in spec.bundles),
        "to unpack, and what says that they are",
    )
    if spec.storage_link:
        yield from link_lines(spec.storage_link)
    yield _set("incomplete", "yes" if spec.incomplete else "")
    if spec.secrets:
        yield _array("secrets", " ".join(map(_name, spec.secrets)))
        yield _set("secrets_path", spec.paths.secrets)


def _environment(environment: Environment, spec: JobSpec) -> Iterator[str]:
    own = environment.variables
    variables = dict(spec.variables)
    tmpdir = variables.pop("TMPDIR", "") if "TMPDIR" not in own else ""
    lines = []
    for name, value in export_lines({**variables, **own}):
        lines.append(f"{name} '=' {value}")
        if environment.expand and name in own and expands(own[name]):
            code = f"{name}={quote_expanded(own[name])}"
            lines[-1] = f"{name} eval {shell_quote(code, f'the variable {name}')}"
    yield _rows("variables", lines)
    yield _array("modules", quote_words(environment.modules, "a module"))
    yield _array("tmpdir", tmpdir and quote_words(tmpdir_parts(tmpdir), "a directory"))
    yield _array("temporary", " ".join(n for n in ("TMP", "TEMPDIR", "TEMP") if n not in own))
    if environment.python is not None:
        yield _set_expanded("python", _readable(environment.python), environment)
        if environment.requirements:
            yield _set("python_name", environment.python)
            yield _array("requirements", quote_words(environment.requirements, "a file"))
    if spec.datasets:
        yield _set("mounts", _mounts(spec))
    yield _set("launches", "yes" if spec.launches else "")
    if (apptainer := environment.apptainer) is not None:
        image = apptainer.image if "://" in apptainer.image else _readable(apptainer.image)
        yield _set_expanded("image", image, environment)
        yield _set("options", _words(apptainer.options, environment)) or "_m_options="
        if not any(word.startswith(("--cwd", "--pwd")) for word in apptainer.options):
            yield "_m_start_in_workspace=yes"
    elif environment.container is not None:
        yield from _container(environment.container, spec)


def _set(name: str, value: str) -> str:
    return f"_m_{name}={shell_quote(value, f'the {name}')}" if value else ""


def _set_path(name: str, path: str) -> str:
    return _set(name, path and path_argument(path))


def _set_expanded(name: str, value: str, environment: Environment) -> str:
    """Return an assignment of a path; of code that makes it, if the path is to be expanded."""
    if not environment.expand or not expands(value):
        return _set(name, value)
    return _set(f"{name}_code", f"_m_{name}={quote_expanded(value)}")


def _array(name: str, words: str) -> str:
    return f"_m_{name}=({words})" if words else ""


def _rows(name: str, rows: Iterable[str], comment: str = "") -> str:
    text = "".join(f"  {row}\n" for row in rows)
    return f"_m_{name}=({f'  # {comment}' if comment else ''}\n{text})" if text else ""


def tmpdir_parts(text: str) -> list[str]:
    """Split a rule's own directory for temporary files (`resources: tmpdir`) for the node.

    Texts and names of variables follow in turn. Snakemake makes the directory where the job runs: a
    variable in its name is the node's, such as those of a scheduler (`$SLURM_JOB_ID`) and of a site
    (`$SCRATCH`), which exist nowhere else. A leading `~` is HOME.
    """
    text = re.sub(r"^~(?=/|$)", "${HOME}", text)
    parts, end = [], 0
    for found in _VARIABLE.finditer(text):
        parts += [text[end : found.start()], found["bare"] or found["braced"]]
        end = found.end()
    return [*parts, text[end:]]


def _gpu_metrics(spec: JobSpec) -> str:
    """Return where the script logs samples of GPUs; empty if MLflow's own monitor does so."""
    variables = {**spec.variables, **spec.environment.variables}
    if variables.get(_MONITOR, "").lower() in ("true", "1") or not spec.live:
        return ""
    return spec.live.metrics


def strip_inline(script: str, spec: JobSpec) -> str:
    """Remove the inline files from the script of `spec`, for people to read."""
    return script.replace(_base64(spec.inline), "")


def _base64(content: bytes) -> str:
    return base64.encodebytes(content).decode("ascii")


def _mounts(spec: JobSpec) -> str:
    """Return APPTAINER_MOUNT, lines of comma-separated values, for the datasets.

    A dataset that contains the workspace is not mounted: it would make that read-only, too.
    """

    def field(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    lines = (
        f"type=bind,{field(f'source={path}')},{field(f'destination={path}')},ro"
        for path in spec.datasets
        if not f"{workspace_top(spec.workspace)}/".startswith(f"{path.rstrip('/')}/")
    )
    return "\n".join(lines)


def _words(words: Sequence[str], environment: Environment) -> str:
    """Return options of a container as text that bash expands to their words."""
    code = environment.expand and any(map(expands, words))
    return " ".join(map(quote_word if code else quote_expandable, words))


def _container(container: Container, spec: JobSpec) -> Iterator[str]:
    """Yield what `srun` starts a container with.

    Raises `UserError` if pyxis cannot mount the workspace or a dataset because of its name.
    """
    source = _readable(container.source) if container.is_file else container.source
    if container.is_file and not source.startswith("/"):
        source = f"{spec.workspace.rstrip('/')}/{source.removeprefix('./')}"
    words = [shell_quote(f"--environment={source}", "the container")]
    if container.plugin == "Pyxis":
        words = [shell_quote(f"--container-image={source}", "the container")]
        mounts = [quote_expandable(mount) for mount in container.mounts]
        # The workspace comes last, so that no other mount covers it.
        top = workspace_top(spec.workspace)
        own = [*(f"{path}:{path}:ro" for path in spec.datasets), f"{top}:{top}"]
        for path in (*spec.datasets, top):
            if set(path) & set(",:"):
                raise UserError(
                    f"pyxis cannot mount {path}: its name has a comma or a colon",
                    where="Environment.Pyxis",
                    do="Use another path (Site: Workspace in the backend config)",
                )
        mounts += [shell_quote(mount, "a mount") for mount in own]
        words.append(f"--container-mounts={','.join(mounts)}")
    words.append(_words(container.options, spec.environment))
    yield _set("plugin", container.plugin)
    yield _set("options", " ".join(filter(None, words)))
    yield _set("container_file", source if container.is_file else "")


def _readable(path: str) -> str:
    """Return the path as written, unless a program could take it for an option."""
    path = path_argument(path)
    return path if path.startswith("./-") else path.removeprefix("./")


def link_lines(path: str) -> list[str]:
    """Return bash that names a link at `path` to the workspace itself, and its target."""
    target = os.path.relpath(".", os.path.dirname(path) or ".")
    return [_set_path("storage_link", path), _set_path("storage_target", target)]


def _segment(segment: Segment) -> Iterator[str]:
    kept = [path for path in segment.checkpoint if os.path.basename(path) != START_MARK]
    folders = [path for path in segment.checkpoint if path.endswith("/")]
    yield f"_m_segment={segment.number} _m_segments={segment.most}"
    yield f"_m_runtime_s={segment.runtime_s} _m_warn_ms={round(1000 * segment.warn_s)}"
    yield _array("checkpoint", quote_paths(kept, "a checkpoint"))
    yield _array("checkpoint_folders", quote_paths(folders, "a checkpoint"))
    if segment.before is not None:
        yield _set_path("segment_before", segment.before.work)


def export_lines(variables: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return names and quoted values for bash's `export`."""
    result = []
    for name, value in variables.items():
        if len(encode_text(f"{name}={value}", f"the variable {name}")) > VARIABLE_BYTES:
            raise UserError(
                f"the variable {name} is longer than {VARIABLE_BYTES} bytes",
                do="Put the value into a file and name the file instead",
            )
        result.append((_name(name), shell_quote(value, f"the variable {name}")))
    return result


def _name(name: str) -> str:
    if VARIABLE_NAME.fullmatch(name):
        return name
    advice = "Use letters, digits and _ only, and no digit first"
    raise UserError(f"{name!r} cannot be the name of a variable", do=advice)
