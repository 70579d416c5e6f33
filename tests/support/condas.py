"""A stand-in for conda, mamba and micromamba that takes its time and bakes paths in."""

from pathlib import Path

TOOL = r"""#!/bin/bash
# Called as any of the three; what it is told is appended to `calls` beside it. An environment file
# is a line of words: `slow` takes half a second, `held` until there is `go` beside it, `broken`
# fails half way, else a name.
here=${0%/*}
printf '%s\n' "${0##*/} $*" >> "$here/calls"
case ${0##*/} in
  *mamba) [ "$1 $2" = "shell activate" ] && target=$3 ;;
  conda) [ "$1 $2" = "shell.posix activate" ] && target=$3 ;;
esac
if [ -n "$target" ]; then
  case $target in */*) prefix=$target ;; *) prefix=$here/${0##*/}-envs/$target ;; esac
  [ -d "$prefix/conda-meta" ] || { echo "no environment $target" >&2; exit 1; }
  printf 'PS1=x\nexport CONDA_PREFIX=%q PATH=%q:"$PATH"\n' "$prefix" "$prefix/bin"
  exit
fi
while [ $# -gt 0 ]; do
  case $1 in --file) file=$2 ;; --prefix) prefix=$2 ;; esac
  shift
done
echo "Collecting package metadata: done"
[ ! -e "$prefix" ] || { echo "CondaValueError: prefix already exists: $prefix"; exit 1; }
words=$(cat "$file") || exit 1
echo "${words//$'\n'/ }" >> "$here/made"
mkdir -p "$prefix/bin" || exit 1
echo half > "$prefix/half"
case $words in
  *endless*) sleep 30 ;;
  *slow*) sleep 0.5 ;;&
  *held*) until [ -e "$here/go" ]; do sleep 0.05; done ;;&
  *broken*) echo "nothing provides $words"; exit 1 ;;
esac
printf '#!/bin/bash\necho %q from %q\n' "$words" "$prefix" > "$prefix/bin/tool"
chmod +x "$prefix/bin/tool"
mkdir "$prefix/conda-meta" && rm "$prefix/half"
"""


def install(directory: Path, *names: str) -> None:
    """Put the tool into a directory under each of the names."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = directory / name
        path.write_text(TOOL)
        path.chmod(0o755)
