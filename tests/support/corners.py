"""Documents in the corners of the Compute Backend Config, with what has to be said of them.

`U`, `F` and `R` stand for the lines of a UNICORE site, of a firecREST site, and of the least
resources. The files that a local image may be are `i.sif` and `5`.
"""

from typing import Any, Final

U: Final = "UnicoreApiUrl: https://u.example.org/rest/core\n"
F: Final = (
    "Firecrest: {ApiUrl: https://f.example.org, TokenUrl: https://t.example.org, Machine: m}\n"
)
R: Final = "Resources: {Queue: q}\n"
FILES: Final = ("main.py", "i.sif", "5", "venv/bin/activate")

_WHOLE = "has to be a whole number of 1 or more"
_TIME = "single unit"
_MEMORY = "one of the units K, M, G, T"
_EMPTY = "is empty (null)"
_NAME = "may hold no blanks"


def _of(key: str, part: str, *values: str) -> list[tuple[str, dict[str, str]]]:
    """Mistakes of one key: the document with each of `values` for it."""
    *outer, last = key.split(".")
    made = []
    for value in values:
        if outer == ["Resources"]:
            queue = "" if last == "Queue" else "Queue: q, "
            text = f"{U}Resources: {{{queue}{last}: {value}}}\n"
        elif outer[:1] == ["Environment"]:
            inner = f"{last}: {value}"
            for name in reversed(outer[1:]):
                path = "Path: i.sif, " if name == "Apptainer" and last != "Path" else ""
                inner = f"{name}: {{{path}{inner}}}"
            text = f"{U}{R}Environment: {{{inner}}}\n"
        elif outer == ["Site"]:
            text = f"{U}{R}Site: {{{last}: {value}}}\n"
        elif outer == ["Firecrest"]:
            good = {"ApiUrl": "https://f.org", "TokenUrl": "https://t.org", "Machine": "m"}
            keys = ", ".join(f"{k}: {v}" for k, v in {**good, last: value}.items())
            text = f"Firecrest: {{{keys}}}\n{R}"
        elif last == "Exclude":
            text = f"{U}{R}Exclude: {value}\n"
        else:
            text = f"{last}: {value}\n{R}"
        made.append((text, {key: part}))
    return made


_HOOKS = [
    f"Environment.{when}RunCommandOn{where}Node"
    for when in ("Pre", "Post")
    for where in ("Login", "Compute")
]

WRONG: Final[list[tuple[str | bytes, dict[str, str]]]] = [
    # --- the document itself
    *((text, {"": "is empty"}) for text in ("", "# only a comment\n", "---\n", "null\n", "~")),
    *((text, {"": "has to be a mapping"}) for text in ("text\n", "5\n", "[]\n", "'{}'\n")),
    (f"{U}{R}---\n{U}{R}", {"": "another document"}),
    (f"{U}Resources:\n\tQueue: q\n", {"": "line 3"}),
    (f"{U}Resources: {{Queue: q\n", {"": "line 3"}),
    (f"{U}Resources: *nope\n", {"": "alias 'nope'"}),
    (f"{U}Resources: &r {{Queue: q, Nodes: *r}}\n", {"": "nested deeper"}),
    (f"{U}Resources: {{Queue: !!python/object:os.system q}}\n", {"": "tag"}),
    (f"{U}Resources: {{? [a] : q}}\n", {"": "not a text", "Resources.Queue": "missing"}),
    ((U + R).encode("utf-16"), {"": "UTF-8"}),
    (f"{U}Resources: {{Queue: ü}}\n".encode("latin-1"), {"": "UTF-8 (byte"}),
    (b"\0" + (U + R).encode(), {"": "YAML"}),
    (b"\x89PNG\r\n\x1a\n", {"": "UTF-8"}),
    (
        f"{U}Resources: {{<<: {{Queue: q}}}}\n",
        {"Resources.<<": "unknown", "Resources.Queue": "missing"},
    ),
    # --- keys twice, keys unknown
    (f"{U}{U}{R}", {"UnicoreApiUrl": "duplicate"}),
    (f"{U}Resources: {{Queue: q, Queue: q}}\n", {"Resources.Queue": "duplicate"}),
    (
        f"{U}{R}Environment: {{Variables: {{A: 1, A: 2}}}}\n",
        {"Environment.Variables.A": "duplicate"},
    ),
    (f"{U}{R}Site: {{MaxJobs: 1, MaxJobs: 1}}\n", {"Site.MaxJobs": "duplicate"}),
    (
        f"{U}{R}Environment: {{Apptainer: {{Path: i.sif, Path: i.sif}}}}\n",
        {"Environment.Apptainer.Path": "duplicate"},
    ),
    (f"unicoreapiurl: https://x.org\n{F}{R}", {"unicoreapiurl": "did you mean UnicoreApiUrl?"}),
    (f"{U}resources: {{}}\n{R}", {"resources": "did you mean Resources?"}),
    (f"{U}{R}SSH: {{Hostname: h}}\n", {"SSH": "not supported"}),
    (f"{U}{R}Account: x\n", {"Account": "MANTIK_COMPUTE_BUDGET_ACCOUNT"}),
    *_of("Resources.QOS", "did you mean QoS?", "high"),
    *_of("Resources.queue", "did you mean Queue?", "q"),
    *_of("Resources.Account", "MANTIK_COMPUTE_BUDGET_ACCOUNT", "x"),
    *_of("Resources.GPUS", "unknown key, did you mean GPUsPerNode?", "1"),
    *_of("Resources.GPUs", "did you mean GPUsPerNode?", "1"),
    *_of("Resources.GPU", "did you mean GPUsPerNode?", "1"),
    *_of("Resources.Partition", "did you mean Queue?", "q"),
    *_of("Resources.Walltime", "did you mean Runtime?", "1h"),
    *_of(
        "Environment.PreRunCommand",
        "did you mean PreRunCommandOnComputeNode or PreRunCommandOnLoginNode?",
        "ls",
    ),
    *_of(
        "Environment.PostRunCommand",
        "did you mean PostRunCommandOnComputeNode or PostRunCommandOnLoginNode?",
        "ls",
    ),
    *_of("Environment.Apptainer.Image", "unknown key", "i.sif"),
    *_of("Environment.Pyhton", "did you mean Python?", "/v"),
    *_of("Environment.Variable", "did you mean Variables?", "{A: 1}"),
    *_of("Site.Polls", "did you mean Poll?", "5s"),
    *_of("Site.Password", "MANTIK_", "hunter2"),
    *_of("Firecrest.Url", "unknown key", "https://x.org"),
    # --- the site
    (R, {"UnicoreApiUrl": "either UnicoreApiUrl or Firecrest"}),
    (f"{F}{U}{R}", {"UnicoreApiUrl": "both are given"}),
    *_of("UnicoreApiUrl", _EMPTY, "~", "", "null"),
    *_of("UnicoreApiUrl", "URL", "5", "[https://x.org]", "x.org/rest", "ftp://x.org", "https://"),
    *_of("UnicoreApiUrl", "URL", "'https://x.org/a b'", "true", "{a: b}", "''"),
    *_of(
        "UnicoreApiUrl", "not an https:// address", "http://x.org/rest/core", "http://10.0.0.1:80"
    ),
    *_of("UnicoreApiUrl", "credentials", "https://me:hunter2@x.org", "https://me@x.org"),
    *_of("UnicoreApiUrl", "query or a fragment", "https://x.org/?a", "'https://x.org/#a'"),
    *_of("Firecrest", "has to be a mapping", "[]", "https://x.org", "5", "true"),
    *_of("Firecrest", _EMPTY, "~"),
    *_of("Firecrest.ApiUrl", "URL", "x", "5", "[]", "''"),
    *_of("Firecrest.TokenUrl", _EMPTY, "~"),
    *_of("Firecrest.Machine", "name", "[a]", "''", "true"),
    # --- Resources
    (U, {"Resources": "is missing"}),
    *((f"{U}Resources: {v}\n", {"Resources": "mapping"}) for v in ("Queue=q", "5", "[Queue: q]")),
    *_of("Resources.Queue", _EMPTY, "~", ""),
    *_of("Resources.Queue", "name", "''", "' '", "[]", "[a, {b: 1}]", "{a: 1}", "true"),
    *_of("Resources.Queue", _NAME, "'a b'", "a#b", "'a\"b'", '"a\'b"'),
    *_of("Resources.Queue", "control characters", '"a\\nb"'),
    *_of("Resources.Queue", "NUL", '"a\\0"'),
    *_of(
        "Resources.Nodes", _WHOLE, "-1", "0", "1.5", "3.0", "1e3", "true", "[1]", "{}", "''", "two"
    ),
    *_of("Resources.Nodes", _WHOLE, "1_000", "99999999999", ".inf", "9" * 400),
    *_of("Resources.TotalCPUs", _WHOLE, "0", "all", "[4]"),
    *_of("Resources.CPUsPerNode", _WHOLE, "0", "all", "false"),
    *_of("Resources.GPUsPerNode", "of 0 or more", "-1", "true", "a100:4", "0.5"),
    *_of("Resources.GPUsPerNode", _EMPTY, "~"),
    *_of("Resources.Runtime", _TIME, "3600", "0", "'0'", "-5m", "1h30m", "1h 30m", "12H", "1.5h"),
    *_of(
        "Resources.Runtime", _TIME, "12 h", "1w", "1min", "12:30:00", "00:30", "true", "[1h]", "{}"
    ),
    *_of("Resources.Runtime", "longer than zero", "0s", "00d"),
    *_of("Resources.Runtime", _EMPTY, "~"),
    *_of("Resources.MemoryPerNode", _MEMORY, "12 GiB", "1.5G", "-1G", "1P", "64Gi", "64B"),
    *_of("Resources.MemoryPerNode", _MEMORY, "true", "[1G]", "12 gigs", "''", "all"),
    *_of("Resources.MemoryPerNode", "more than zero", "0G"),
    *_of("Resources.Memory", _MEMORY, "64B"),
    *_of("Resources.NodeConstraints", "name", "[gpu, a]", "true", "{}"),
    *_of("Resources.Reservation", _NAME, "'a b'"),
    *_of("Resources.QoS", _EMPTY, "~"),
    (f"{U}Resources: {{Queue: q, TotalCPUs: 9, Nodes: 2}}\n", {"Resources.TotalCPUs": "divided"}),
    (
        f"{U}Resources: {{Queue: q, TotalCPUs: 9, CPUsPerNode: 2}}\n",
        {"Resources.TotalCPUs": "multiple"},
    ),
    (f"{U}Resources: {{Queue: q, Memory: 1G, MemoryPerNode: 1G}}\n", {"Resources.Memory": "both"}),
    # --- Environment
    *((f"{U}{R}Environment: {v}\n", {"Environment": "mapping"}) for v in ("[]", "x", "5")),
    (f"{U}{R}Environment:\n", {"Environment": _EMPTY}),
    (
        f"{U}{R}Environment: {{Apptainer: {{Path: i.sif}}, Python: /v}}\n",
        {"Environment": "Only one execution environment is allowed"},
    ),
    *_of("Environment.Apptainer", "has to be a mapping", "i.sif", "[]", "true"),
    *_of("Environment.Apptainer", _EMPTY, "~"),
    (f"{U}{R}Environment: {{Apptainer: {{}}}}\n", {"Environment.Apptainer.Path": "missing"}),
    *_of("Environment.Apptainer.Path", _EMPTY, "~"),
    *_of("Environment.Apptainer.Path", "path", "''", "[i.sif]", "{}"),
    *_of("Environment.Apptainer.Path", "not expanded", "~/i.sif"),
    *_of("Environment.Apptainer.Path", "is no file on this machine", "$HOME/i.sif"),
    *_of("Environment.Apptainer.Path", "was not found", "j.sif", "venv", "/no/where.sif"),
    *_of("Environment.Apptainer.Path", "no file on this machine", "docker://alpine"),
    *_of("Environment.Apptainer.Type", "local or remote", "docker", "5", "'local '' '"),
    *_of("Environment.Apptainer.Type", "text", "[local]", "true"),
    (
        f"{U}{R}Environment: {{Apptainer: {{Path: ../i.sif, Type: REMOTE}}}}\n",
        {"Environment.Apptainer.Path": "must be absolute"},
    ),
    *_of("Environment.Apptainer.Options", "a text or a list", "5", "{nv: true}", "true"),
    *_of("Environment.Apptainer.Options", "entry 2", "[--nv, ~]", "[--nv, [--nv]]", "[--nv, ' ']"),
    *_of("Environment.Apptainer.Options", "not closed", '"--env \'A=b"', "'--env \"A'"),
    *_of("Environment.Apptainer.Options", "unquoted", "'--nv; x'", "'$(id'", "'a|b'", "'`id`'"),
    *_of("Environment.Apptainer.Options", "is not expanded", "'$(id)'"),
    *_of("Environment.Apptainer.Options", "unquoted '#'", "'--nv # no'"),
    *_of("Environment.Apptainer.Options", "backslash", "'--nv \\'"),
    *_of("Environment.Python", "path", "5", "[/v]", "true", "''"),
    *_of("Environment.Python", "leaves the project folder", "../venv", "a/../../b"),
    *_of("Environment.Python", "not expanded", "~/venv", "$PROJECT/venv"),
    (f"{U}{R}Environment: {{Python: {{}}}}\n", {"Environment.Python.Path": "missing"}),
    *_of("Environment.Modules", "list of module names", "Python", "'A B'", "{A: 1}", "true", "5"),
    *_of("Environment.Modules", "entry 1", "[~]", "['']", "[[a]]", "[true]"),
    *_of("Environment.Variables", "mapping", "A=1", "[A, 1]", "5"),
    *_of("Environment.Variables", _EMPTY, "~"),
    *_of("Environment.Variables.A", "has to be a text", "~", "[1]", "{b: 1}", ""),
    *_of("Environment.Variables.A", "NUL", '"x\\0"'),
    *_of("Environment.Variables.SRUN_CPUS_PER_TASK", "has to be a text", "~"),
    *(
        (
            f"{U}{R}Environment: {{Variables: {{{name!r}: x}}}}\n",
            {f"Environment.Variables.{name}": part},
        )
        for part, names in (
            ("is not a name", ("1A", "A B", "A-B", "5", "~", "", "Ä", "A=B")),
            ("set by bash itself", ("UID", "EUID", "PPID", "RANDOM", "PWD", "IFS", "SHLVL", "_")),
        )
        for name in names
    ),
    *(each for hook in _HOOKS for each in _of(hook, "of type str or list", "{a: b}", "5", "true")),
    *(each for hook in _HOOKS for each in _of(hook, "entry 2", "[a, ~]", "[a, '']", "[a, [b]]")),
    *(each for hook in _HOOKS for each in _of(hook, "is empty", "''", "' '", "~")),
    *(
        (
            f"{F}{R}Environment: {{{hook}RunCommandOnLoginNode: {value}}}\n",
            {f"Environment.{hook}RunCommandOnLoginNode": "not supported by firecREST"},
        )
        for hook in ("Pre", "Post")
        for value in ("[]", "x", "[a, b]")
    ),
    # --- Exclude
    *_of("Exclude", "list of patterns", "x", "{}", "5", "true"),
    *_of("Exclude", _EMPTY, "~"),
    *_of("Exclude", "entry 2", "[a, ~]", "[a, '']", "[a, [b]]", "[a, true]", "[a, {b: 1}]"),
    *_of("Exclude", "is absolute", "[/x]", "['!/x']", "[/]"),
    *_of("Exclude", "leaves the project folder", "[../x]", "[a/../b]"),
    *_of("Exclude", "has . as a part", "[./x]", "['!./x']", "[a/./b]", "[.]", "[./]"),
    *_of("Exclude", "nothing clear", "[a//b]", "['a***']"),
    *_of("Exclude", "comment", "['#x']"),
    # --- Site
    *((f"{U}{R}Site: {v}\n", {"Site": "mapping"}) for v in ("[]", "x")),
    (f"{U}{R}Site:\n", {"Site": _EMPTY}),
    *_of("Site.Scheduler", "slurm, pbs or none", "lsf", "5"),
    (f"{F}{R}Site: {{Scheduler: None}}\n", {"Site.Scheduler": "firecREST"}),
    *_of("Site.Poll", _TIME, "5", "1m30s"),
    *_of("Site.MaxJobs", _WHOLE, "0", "many"),
    *_of("Site.ProjectFilesLimit", "bytes", "much", "-1", "1.5M"),
    *_of("Site.Proxy", "credentials", "http://u:hunter2@h"),
    *_of("Site.CAFile", "was not found", "no.pem"),
    *_of("Site.Workspace", "path at the site", "../up", "~/ws", "$SCRATCH/ws"),
    (f"{U}Resources: {{Queue: q, QoS: x}}\nSite: {{Scheduler: PBS}}\n", {"Resources.QoS": "PBS"}),
]
"""Documents, and for each mistake its key with a part of its message: no more, no less."""


def _env(text: str) -> str:
    return f"{U}{R}Environment: {text}\n"


RIGHT: Final[list[tuple[str, dict[str, Any]]]] = [
    (f"\ufeff{U}{R}", {"resources.queue": "q"}),
    ((U + R).replace("\n", "\r\n"), {"resources.queue": "q"}),
    (f"%YAML 1.1\n---\n{U}Resources: {{Queue: no}}\n", {"resources.queue": "no"}),
    (f"---\n{U}{R}...\n", {"resources.queue": "q"}),
    (f"{U}Resources: &r {{Queue: &q q, QoS: *q}}\n", {"resources.qos": "q"}),
    (f"{U}Resources: !!map {{? Queue : !!str 5}}\n", {"resources.queue": "5"}),
    (f"UnicoreApiUrl: https://u.org/rest/core//\n{R}", {"api_url": "https://u.org/rest/core"}),
    *((f"{U}Resources: {{Queue: {v}}}\n", {"resources.queue": v})
      for v in ("5", "1.50", "no", "0o7", "12:30:00", "2026-01-01", "on", "ü")),
    *((f"{U}Resources: {{Queue: q, Nodes: {v}}}\n", {"resources.nodes": n})
      for v, n in (("'3'", 3), ("' 3 '", 3), ("+3", 3), ("0x10", 16), ("0o17", 15), ("010", 10))),
    *((f"{U}Resources: {{Queue: q, Runtime: {v}}}\n", {"resources.runtime_s": n})
      for v, n in (("90s", 90), ("01h", 3600), ("' 12h '", 43200), ("1d", 86400), ("48h", 172800))),
    *((f"{U}Resources: {{Queue: q, MemoryPerNode: {v}}}\n", {"resources.memory_mib_per_node": n})
      for v, n in (("64G", 65536), ("64g", 65536), ("64GB", 65536), ("64gib", 65536), ("1K", 1),
                   ("1025K", 2), ("2T", 2097152), ("12GIB", 12288), ("512M", 512))),
    (f"{U}Resources: {{Queue: q, GPUsPerNode: '0'}}\n", {"resources.gpus_per_node": 0}),
    *((f"{U}Resources: {{Queue: q, NodeConstraints: {v}}}\n", {"resources.node_constraints": n})
      for v, n in (("gpu&a100", "gpu&a100"), ("'[a|b]'", "[a|b]"), ("'(a*2)'", "(a*2)"))),
    (_env("{}"), {"environment.apptainer": None, "environment.python": None}),
    (_env("{Apptainer: {Path: ./i.sif, Type: LOCAL}}"), {"environment.apptainer.type": "local"}),
    (_env("{Apptainer: {Path: 5}}"), {"environment.apptainer.path": "5"}),
    (_env("{Apptainer: {Path: oras://x/y, Type: Remote}}"),
     {"environment.apptainer.type": "remote"}),
    (_env("{Apptainer: {Path: i.sif, Options: ''}}"), {"environment.apptainer.options": ()}),
    (_env("{Apptainer: {Path: i.sif, Options: []}}"), {"environment.apptainer.options": ()}),
    (_env("{Apptainer: {Path: i.sif, Options: [--nv, 5, '-B a:b']}}"),
     {"environment.apptainer.options": ("--nv", "5", "-B", "a:b")}),
    (_env("{Python: venv/}"), {"environment.python.path": "venv"}),
    (_env("{Python: {Path: /p/my venv}}"), {"environment.python.path": "/p/my venv"}),
    (_env("{Modules: []}"), {"environment.modules": ()}),
    (_env("{Modules: [A/3.10, 3.10, 'B C']}"),
     {"environment.modules": ("A/3.10", "3.10", "B", "C")}),
    (
        _env("{Variables: {A: 0.10, B: 1e-3, C: 010, D: 0o17, E: 0x1F, F: 123456789012345678901234,"
             " G: +1, H: 1_000, I: .inf, J: -0, K: 1E5, L: 2026-01-01, M: 12:30:00, N: true,"
             " O: False, P: no, Q: '', R: \" x\\n\\ty\", S: \"it's $X\", T: ~x}}"),
        {"environment.variables": {
            "A": "0.10", "B": "1e-3", "C": "010", "D": "0o17", "E": "0x1F",
            "F": "123456789012345678901234", "G": "+1", "H": "1_000", "I": ".inf", "J": "-0",
            "K": "1E5", "L": "2026-01-01", "M": "12:30:00", "N": "true", "O": "false", "P": "no",
            "Q": "", "R": " x\n\ty", "S": "it's $X", "T": "~x"}},
    ),
    (_env("{PreRunCommandOnLoginNode: []}"), {"environment.before_on_login": ()}),
    (_env("{PreRunCommandOnLoginNode: [true, 5, \"a\\nb\"]}"),
     {"environment.before_on_login": ("true", "5", "a\nb")}),
    (_env("{PostRunCommandOnComputeNode: ' x '}"), {"environment.after_on_compute": ("x",)}),
    (f"{U}{R}Exclude: []\n", {"exclude": ()}),
    (f"{U}{R}Exclude: [5, .env, 'a b ', '!x', '*', '[', data/]\n",
     {"exclude": ("5", ".env", "a b ", "!x", "*", "[", "data/")}),
    (f"{U}{R}Site: {{}}\n", {"site.max_jobs": 100}),
    (f"{U}{R}Site: {{Scheduler: PBS, Poll: 5s, ProjectFilesLimit: 10}}\n",
     {"site.scheduler": "pbs", "site.poll_s": 5, "site.project_files_limit_bytes": 10}),
]  # fmt: skip
"""Documents without a mistake, and values that they have."""
