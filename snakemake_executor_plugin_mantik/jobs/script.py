"""Render a job's script: one complete bash script per try, from `script.sh.j2`.

All text from the user is quoted for bash, except the options of Apptainer. These use bash's quotes
themselves: `$NAME`, `${NAME}` and `~/` at the beginning of a word are expanded on the node, and
nothing else is.
"""

import base64
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import UserError

from . import live_packs
from .expansion import expands, quote_expanded, quote_word
from .paths import IMPORTED, UP, UPS, bundle_done_path, bundle_path, workspace_root, workspace_top
from .segments import GO_ON_CODE, START_MARK
from .spec import Container, Environment, JobSpec, Segment
from .templates import load_template, venv_text
from .tmpdir import make_tmpdir_code

PREDECESSORS: Final = "predecessors"
CHECKPOINT: Final = "checkpoint"

STEPS: Final = (
    "workspace",  # enter the workspace
    PREDECESSORS,  # check that the tries that make inputs have succeeded
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

COMMAND_BYTES: Final = 100_000
"""A longer command is written to a file: Linux accepts no argument of 128 KiB or more."""

_SUM_DIGITS: Final = 32
"""Digits of an input's checksum that a script holds: 128 bits, for many inputs in one script."""

SMALL_BYTES: Final = 1 << 20
"""A larger input is read only if its content may differ from the uploaded one."""

MOST_NEW: Final = 500
"""Most new files beside the outputs that a marker lists."""

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

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = r"\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*\})"
_PLAIN_WORD = re.compile(rf"(?:[A-Za-z0-9_@%+=:,./^-]|{_VARIABLE})+")
_IN_QUOTES = re.compile(rf"({_VARIABLE})|([\\\"`$])")
# In double quotes, a backslash before any other character is a literal backslash.
_ESCAPED = re.compile(r'\\([\\$`"])')
# The parts of a word: in single quotes, in double quotes, after a backslash, unquoted.
_PARTS = re.compile(
    r"""'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|\\(?P<escaped>.)|(?P<bare>[^'"\\]+|.)""",
    re.DOTALL,
)


def render_script(spec: JobSpec) -> str:
    """Render the bash script that runs the try `spec`; the same spec gives the same script.

    Raises `UserError` for a NUL character, an invalid name of a variable, and a variable of more
    than `VARIABLE_BYTES`.
    """
    paths, environment = spec.paths, spec.environment
    variables = dict(spec.variables)
    tmpdir = variables.pop("TMPDIR", "") if "TMPDIR" not in environment.variables else ""
    temporary = [n for n in ("TMP", "TEMPDIR", "TEMP") if n not in environment.variables]
    return load_template("script.sh.j2").render(
        title=" ".join(spec.name.split())[:200],
        workspace=shell_quote(spec.workspace, "the workspace"),
        up=UP,
        ups=UPS if workspace_root(spec.workspace) != spec.workspace else (),
        try_id=shlex.quote(paths.try_id),
        tries=shlex.quote(paths.tries),
        claim=shlex.quote(paths.claim),
        work=shlex.quote(paths.work),
        limits=spec.limits,
        incomplete=spec.incomplete,
        own_umask="027" if spec.shared else "077",
        umask="" if spec.umask is None else f"{spec.umask:04o}",
        inputs=_inputs(spec),
        outputs=_outputs(spec),
        stored=[
            shell_quote(path_argument(file.path), "an output")
            for file in spec.outputs
            if file.stored
        ],
        mounts=_mounts(spec),
        container=environment.container and _container(environment.container, spec),
        storage_link=spec.storage_link and link_words(spec.storage_link),
        bundles=[
            {"path": shlex.quote(bundle_path(name)), "done": shlex.quote(bundle_done_path(name))}
            for name in spec.bundles
        ],
        moved=",".join(str(3 * n) for n, file in enumerate(spec.inputs) if file.moved),
        inline=_base64(spec.inline),
        numbers=[
            (shell_quote(path_argument(p), "an input"), n) for p, n in sorted(spec.numbers.items())
        ],
        term=spec.term,
        identity=shell_quote(spec.identity, "the job's identity"),
        predecessors=[
            (
                one.code,
                shlex.quote(f"./{one.paths.claim}"),
                " ".join(shell_quote(path_argument(path), "an input") for path in one.makes),
            )
            for one in spec.after
        ],
        imported=IMPORTED,
        most_new=MOST_NEW,
        segment=spec.segment and _segment(spec.segment),
        sum_digits=_SUM_DIGITS,
        small_bytes=SMALL_BYTES,
        secrets=" ".join(_name(name) for name in spec.secrets),
        secrets_path=shlex.quote(f"./{paths.secrets}"),
        variables=export_lines({**variables, **environment.variables}),
        tmpdir=tmpdir
        and make_tmpdir_code(tmpdir, '"$_m_workspace"', "_m_fail {}").replace("\n", "\n  "),
        expanded=_expanded(environment),
        modules=" ".join(shell_quote(name, "a module") for name in environment.modules),
        modules_text=_in_double_quotes(" ".join(environment.modules)),
        before=[shell_quote(text, "a command") for text in environment.before_on_compute],
        after=[shell_quote(text, "a command") for text in environment.after_on_compute],
        **_python(environment),
        venv=_venv(environment),
        temporary="".join(f' {name}="$TMPDIR"' for name in temporary),
        commands=_commands(spec),
        benchmark=spec.benchmark
        and shell_quote(path_argument(spec.benchmark.path), "the measurements"),
        benchmark_file=spec.benchmark
        and shell_quote(path_argument(spec.benchmark.file), "the benchmark"),
        always_zero=bool(environment.after_on_login),
        launches=spec.launches,
        live=spec.live
        and shell_quote(path_argument(spec.live.path), "the directory that is shown"),
        gpus=bool(spec.resources.gpus_per_node),
        gpu_metrics=_gpu_metrics(spec),
        growing=spec.live and shlex.quote(spec.live.growing),
        pack_bytes=live_packs.PACK_BYTES,
        piece_bytes=live_packs.PIECE_BYTES,
        **_apptainer(environment, spec.workspace),
    )


def _gpu_metrics(spec: JobSpec) -> str:
    """Return where the script logs samples of GPUs; empty if MLflow's own monitor does so."""
    variables = {**spec.variables, **spec.environment.variables}
    if variables.get(_MONITOR, "").lower() in ("true", "1") or not spec.live:
        return ""
    metrics = spec.live.metrics
    return shell_quote(path_argument(metrics), "the directory of metrics") if metrics else ""


def strip_inline(script: str, spec: JobSpec) -> str:
    """Remove the inline files from the script of `spec`, for people to read."""
    return script.replace(_base64(spec.inline), "")


def _base64(content: bytes) -> str:
    return base64.encodebytes(content).decode("ascii")


def _commands(spec: JobSpec) -> list[dict[str, str]]:
    """Return text, file (if any) and start of the command, or of each run of a benchmark."""
    commands = []
    for number, text in enumerate(spec.benchmark.commands if spec.benchmark else [spec.command]):
        command, shell = shell_quote(text, "the command"), shell_quote(spec.shell, "the shell")
        file = ""
        start = f"{shell} -c {command}"
        if len(encode_text(text, "the command")) > COMMAND_BYTES:
            file = f"{spec.paths.work}/command{number or ''}"
            absolute = f"{spec.workspace.rstrip('/')}/{file}"
            start = f"{shell} {shlex.quote(absolute)}"
        commands.append(
            {"text": command, "file": shlex.quote(file) if file else "", "start": start}
        )
    return commands


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
    text = "\n".join(lines)
    return shell_quote(text, "a dataset") if text else ""


def _python(environment: Environment) -> dict[str, str]:
    """Return the virtual environment's path, and bash that sets it if it is to be expanded."""
    path = environment.python
    if path is None:
        return {"python": "", "python_code": ""}
    return _path("python", _readable(path), environment)


def _path(name: str, path: str, environment: Environment) -> dict[str, str]:
    """Return a path as a word of bash, and an assignment to run before if bash is to expand it."""
    if not environment.expand or not expands(path):
        return {name: shell_quote(path, f"the {name}"), f"{name}_code": ""}
    code = f"_m_{name}={quote_expanded(path)}"
    return {name: f'"$_m_{name}"', f"{name}_code": shell_quote(code, f"the {name}")}


def _options(options: Iterable[str], environment: Environment) -> dict[str, str]:
    """Return options as words of bash, and an assignment to run before if they hold code."""
    words = list(options)
    if not environment.expand or not any(map(expands, words)):
        text = "".join(f" {quote_expandable(word)}" for word in words)
        return {"options": text, "options_code": ""}
    code = f"_m_options=({' '.join(map(quote_word, words))})"
    return {"options": ' "${_m_options[@]}"', "options_code": shell_quote(code, "the options")}


def _apptainer(environment: Environment, workspace: str) -> dict[str, object]:
    apptainer = environment.apptainer
    if apptainer is None:
        return {"image": "", **_options((), environment)}
    is_file = "://" not in apptainer.image
    return {
        **_path("image", _readable(apptainer.image) if is_file else apptainer.image, environment),
        "image_is_file": is_file,
        **_options(apptainer.options, environment),
        "bind": shlex.quote(re.sub(r"([\\,:])", r"\\\1", workspace_top(workspace))),
        # APPTAINER_PWD would override --cwd, and APPTAINER_CWD --pwd.
        "set_directory": not any(w.startswith(("--cwd", "--pwd")) for w in apptainer.options),
    }


def _venv(environment: Environment) -> str:
    """Return bash that makes the virtual environment; empty if it lies at the site."""
    if environment.python is None or not environment.requirements:
        return ""
    return venv_text(
        environment.python,
        environment.requirements,
        place='"$_m_python"' if environment.expand and expands(environment.python) else "",
        who="Environment: Python",
        modules=environment.modules,
    )


def _expanded(environment: Environment) -> dict[str, str]:
    """Return the assignments of variables whose values bash expands, for `eval`, by name."""
    if not environment.expand:
        return {}
    found = {}
    for name, value in environment.variables.items():
        if "$" in value or "`" in value:
            text = f"{name}={quote_expanded(value)}"
            found[name] = shell_quote(text, f"the variable {name}")
    return found


def _container(container: Container, spec: JobSpec) -> dict[str, object]:
    """Return the values for `container.sh.j2`.

    Raises `UserError` if pyxis cannot mount the workspace or a dataset because of its name.
    """
    source = _readable(container.source) if container.is_file else container.source
    if container.is_file and not source.startswith("/"):
        source = f"{spec.workspace.rstrip('/')}/{source.removeprefix('./')}"
    words = [f"--environment={source}"]
    mounts: list[str] = []
    if container.plugin == "Pyxis":
        words = [f"--container-image={source}"]
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
    own_names = {*spec.variables, *spec.environment.variables}
    return {
        "words": " ".join(shell_quote(word, "the container") for word in words),
        "mounts": ",".join(mounts),
        **_options(container.options, spec.environment),
        "file": shell_quote(source, "the container") if container.is_file else "",
        "names": " ".join(sorted(own_names)),
        "inside": shlex.quote(f"./{spec.paths.work}/inside"),
        "started": shlex.quote(f"./{spec.paths.work}/started"),
        "codes": shlex.quote(f"./{spec.paths.work}/code"),
        "code": shlex.quote(f"{spec.paths.work}/srun"),
        "own_tmp": shlex.quote(f"{spec.paths.work}/scratch"),
    }


def _readable(path: str) -> str:
    """Return the path as written, unless a program could take it for an option."""
    path = path_argument(path)
    return path if path.startswith("./-") else path.removeprefix("./")


def _inputs(spec: JobSpec) -> str:
    return _lines(
        f"{'/' if file.directory else '-' if file.size is None else file.size} "
        f"{file.sha256[:_SUM_DIGITS] or '-'}{'+' if file.changed else ''} "
        f"{shell_quote(path_argument(file.path), 'an input')}"
        for file in spec.inputs
    )


def link_words(path: str) -> dict[str, str]:
    """Return a link at `path` to the workspace itself: its directory and target, and it; quoted."""
    folder = os.path.dirname(path) or "."
    words = {"folder": folder, "target": os.path.relpath(".", folder), "path": path}
    return {name: shell_quote(path_argument(word), "a link") for name, word in words.items()}


def _outputs(spec: JobSpec) -> str:
    return _lines(
        f"{file.kind} {'yes' if file.directory else 'no'} {'yes' if file.keep else 'no'} "
        f"{shell_quote(path_argument(file.path), 'an output')}"
        for file in spec.outputs
    )


def _segment(segment: Segment) -> dict[str, object]:
    def words(paths: Iterable[str]) -> str:
        return " ".join(shell_quote(path_argument(path), "a checkpoint") for path in paths)

    return {
        "number": segment.number,
        "most": segment.most,
        "checkpoint": words(
            path for path in segment.checkpoint if os.path.basename(path) != START_MARK
        ),
        "folders": words(path for path in segment.checkpoint if path.endswith("/")),
        "runtime_s": segment.runtime_s,
        "warn_ms": round(1000 * segment.warn_s),
        "before": segment.before and shlex.quote(f"./{segment.before.work}"),
        "exit_code": GO_ON_CODE,
    }


def _lines(items: Iterable[str]) -> str:
    text = "".join(f"  {item}\n" for item in items)
    return f"\n{text}" if text else ""


def path_argument(path: str) -> str:
    """Prefix a relative path with `./`, so that no program takes it for an option.

    Slashes at its end are removed.
    """
    path = path.rstrip("/") or "/"
    return path if path.startswith("/") else f"./{path.removeprefix('./')}"


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
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot be the name of a variable",
            do="Use letters, digits and _ only, and no digit first",
        )
    return name


def shell_quote(text: str, what: str) -> str:
    """Quote the text as one word of bash; `what` names it in the error."""
    encode_text(text, what)
    return shlex.quote(text)


def encode_text(text: str, what: str) -> bytes:
    """Encode the text as UTF-8; bytes of file names that are not UTF-8 stay as they are."""
    if "\0" in text:
        raise UserError(f"{what} holds a NUL character", do="Remove it")
    return text.encode("utf-8", "surrogateescape")


def quote_expandable(word: str) -> str:
    """Quote a word that may hold quotes of bash, so that only `$NAME` and `${NAME}` expand.

    `~` and `~/…` expand as well, because Apptainer does not know the home directory. `~user`, `~+`
    and `NAME=~/…` do not, although bash would expand them.
    """
    encode_text(word, "an option of Apptainer")
    if word == "~":
        return word
    home = "~/" if word.startswith("~/") else ""
    rest = "".join(map(_part, _PARTS.finditer(word.removeprefix(home))))
    return f"{home}{rest}" or "''"


def _part(match: re.Match[str]) -> str:
    """Quote one part of a word: text in one kind of quotes, or unquoted."""
    if match["bare"] is not None:
        bare = match["bare"]
        return bare if _PLAIN_WORD.fullmatch(bare) else f'"{_in_double_quotes(bare, keep=True)}"'
    if match["double"] is None:
        return shlex.quote(match["single"] if match["escaped"] is None else match["escaped"])
    pieces = _ESCAPED.split(match["double"])  # every second one is an escaped character
    return "".join(
        f'"{_in_double_quotes(piece, keep=True)}"' if number % 2 == 0 else shlex.quote(piece)
        for number, piece in enumerate(pieces)
        if piece or len(pieces) == 1
    )


def _in_double_quotes(text: str, *, keep: bool = False) -> str:
    """Escape the text for double quotes; `keep` lets variables expand."""

    def escaped(match: re.Match[str]) -> str:
        return match[0] if keep and match[1] else re.sub(r"([\\\"`$])", r"\\\1", match[0])

    return _IN_QUOTES.sub(escaped, text)
