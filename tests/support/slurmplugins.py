"""A fake of the Slurm plugins that start containers: the Container Engine and pyxis.

Neither can be installed here. `SRUN` is put in front of another srun (the sandbox's, or that of a
real Slurm) and does what their documentation says: it takes `--environment=`, `--container-image=`
and `--container-mounts=` away, and passes every other option on, which a real srun refuses if it
does not know it. The command sees a root of its own, read-only, with the mounts alone. It starts in
`/`, the directory of the image. It gets the job's environment only with `--export=ALL`, and the
variables of the image (`PATH`, `FROM_IMAGE`) come first.
"""

import shutil
import subprocess
from pathlib import Path

SRUN = r"""#!/bin/bash
# A fake of CSCS's Container Engine and NVIDIA's pyxis for tests: see tests/support/slurmplugins.py.
here=${0%/*} passed=() mounts=() image= all=
[[ ${ALL_ARGUMENTS-} ]] && printf '%q ' "$@" >> "$ALL_ARGUMENTS" && echo >> "$ALL_ARGUMENTS"
while [[ $1 == -* ]]; do
  case $1 in
    --environment=*)
      file=${1#*=}
      [[ $file == */* ]] || file=$HOME/.edf/$file.toml
      [ -r "$file" ] || { echo "slurmstepd: error: no such environment: $file" >&2; exit 1; }
      image=$(sed -n 's/^image = "\(.*\)"/\1/p' "$file")
      IFS=, read -r -a mounts < <(sed -n 's/^mounts = \[\(.*\)\]/\1/p' "$file" | tr -d '" ') ;;
    --container-image=*) image=${1#*=} ;;
    --container-mounts=*) IFS=, read -r -d '' -a mounts < <(printf '%s\0' "${1#*=}") ;;
    --export=ALL) all=1; passed+=("$1") ;;
    *) passed+=("$1") ;;
  esac
  shift
done
[ -n "$image" ] || { echo "the fake starts containers only" >&2; exit 1; }
PATH=${PATH#*"$here":}
[[ $image != *missing* ]] || { echo "pyxis: failed to import docker image" >&2; exit 1; }
export FAKE_MOUNTS; FAKE_MOUNTS=$(printf '%q ' "${mounts[@]}")
[ -n "$all" ] || passed+=(--export=PATH,FAKE_MOUNTS)
trap : TERM USR1 USR2
srun "${passed[@]}" "$here/fake-container" "$@"
"""

CONTAINER = r"""#!/bin/bash
# Becomes the command in a root of its own: needs a user and a mount namespace.
root=$(mktemp -d) || exit
export FAKE_ROOT=$root
exec unshare --map-root-user --mount bash -c '
  set -e
  mount -t tmpfs none "$FAKE_ROOT"
  for place in /usr /bin /sbin /lib /lib64 /etc /proc /dev; do
    [ -e "$place" ] || continue
    if [ -L "$place" ]; then cp -P "$place" "$FAKE_ROOT$place"; continue; fi
    mkdir -p "$FAKE_ROOT$place"
    mount --rbind "$place" "$FAKE_ROOT$place"
  done
  eval "mounts=($FAKE_MOUNTS)"
  for mount in "${mounts[@]}"; do
    [ -n "$mount" ] || continue
    from=${mount%%:*} to=${mount#*:}
    mkdir -p "$FAKE_ROOT${to%%:*}"
    mount --rbind "$from" "$FAKE_ROOT${to%%:*}"
  done
  mkdir -p "$FAKE_ROOT/tmp"
  chmod 1777 "$FAKE_ROOT/tmp"
  mount -o remount,ro "$FAKE_ROOT"
  unset FAKE_MOUNTS
  chroot=$(PATH=$PATH:/usr/sbin:/sbin command -v chroot)
  export FROM_IMAGE=image PATH=/usr/bin:/bin
  cd "$FAKE_ROOT"
  exec "$chroot" . "$@"
' fake "$@"
"""


def install(directory: Path) -> str:
    """Put the fake into `directory`; return the command that makes a job find it first."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (("srun", SRUN), ("fake-container", CONTAINER)):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    return f"export PATH={directory}:$PATH"


def lacking() -> list[str]:
    """What this machine lacks for the fake: processes need namespaces of their own."""
    command = ["unshare", "--map-root-user", "--mount", "true"]
    able = (
        shutil.which("unshare") is not None
        and not subprocess.run(command, capture_output=True, check=False).returncode
    )
    return [] if able else ["namespaces for users"]
