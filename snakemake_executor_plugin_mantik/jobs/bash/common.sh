# What mantik's job scripts have in common. Their texts hold only data and calls of the functions below.
# Needs bash 4.2, coreutils, GNU find, GNU tar and gzip.
#
# A place has one such file per version of the executor, named after its checksum. It defines
# functions only. What comes before this has the values that both ends know (`jobs/library.py`).

_m_say() { printf 'mantik: %s\n' "${_m_who:+$_m_who: }$*" >&2; }

_m_now() {
  if [ -n "${EPOCHREALTIME-}" ]; then _m_time=${EPOCHREALTIME/,/.}; else _m_time=$(date +%s.%N); fi
}

_m_make_uuid() {
  { read -r _m_uuid < /proc/sys/kernel/random/uuid; } 2>/dev/null ||
    _m_uuid=$RANDOM$RANDOM$RANDOM-$BASHPID
}

# Reads the data that are too long for the script: `_m_lists` has the files that hold them, compressed,
# and their names the checksum. Fails if not all is there, as after a purge of the workspace.
_m_read_lists() {
  local text sum=${_m_lists##*/lists.}
  while :; do
    { text=$(cat -- "${_m_lists[@]}" | gzip -dc); } 2>/dev/null
    [ "$(printf '%s\n' "$text" | sha256sum)" != "${sum%.*}  -" ] || break
    (( SECONDS < _m_visible_s )) || return
    sleep 0.2
  done
  eval "$text"
}

# Creates the file $1 with the text $2 unless it exists: a hard link to $1.by-$3, which only one
# process can make, also on NFS. The exit code of `ln` is ignored: a repeated NFS call can report a
# failure to the process that made the link. Callers read the file instead. Without hard links it is
# created with O_EXCL. This is as safe, except on NFS before version 3, but a process that dies between
# creating and filling the file leaves an empty one.
_m_create() {
  if printf '%s\n' "$2" > "$1.by-$3"; then ln -T -- "$1.by-$3" "$1" 2>/dev/null; fi
  [ -e "$1" ] || ( set -C; printf '%s\n' "$2" > "$1" ) 2>/dev/null
  rm -f -- "$1.by-$3"
}

# Gives the file $1 the text $2, at once.
_m_replace() { printf '%s\n' "$2" > "$1.$_m_attempt" && mv -f -- "$1.$_m_attempt" "$1"; }

# Sets _m_sums to the checksums of files, in their order; to none if one of them cannot be read.
_m_read_sums() {
  local line
  _m_sums=()
  # One line for each file, which begins with a backslash if its name has a newline.
  while IFS= read -r line; do
    line=${line#\\}
    _m_sums+=("${line%% *}")
  done < <(sha256sum -- "$@")
  (( ${#_m_sums[@]} == $# )) || _m_sums=()
}

# Calls the function $1 with a directory and up to 500 files in it, until it was called with all files
# of the list on stdin, which gives each file's directory before its name.
_m_by_directory() {
  local folder='' last='' name
  local -a files=()
  while IFS= read -r -d '' folder && IFS= read -r -d '' name; do
    if (( ${#files[@]} )) && [[ $folder != "$last" || ${#files[@]} -ge 500 ]]; then
      "$1" "$last" "${files[@]}" || return
      files=()
    fi
    files+=("$folder/$name") last=$folder
  done
  (( ${#files[@]} == 0 )) || "$1" "$last" "${files[@]}"
}

# Succeeds if the path $1 is in `_m_places`, or below a path in it.
_m_is_placed() {
  local path=$1
  until [ -n "${_m_places[$path]+yes}" ]; do
    case $path in ?*/*) path=${path%/*} ;; *) return 1 ;; esac
  done
}

# Sets _m_pids to the processes below $1, without $2 and those below it. Adds those of this job that
# the scheduler itself started beside the script (srun), unless this is a group's member: they are in
# the job's other control groups.
_m_family() {
  local line pid rest more=1 group=
  local -A parent=() inside=()
  local -a lines
  _m_pids=()
  mapfile -t lines < <(cat /proc/[0-9]*/stat)
  for line in "${lines[@]}"; do
    pid=${line%% *} rest=${line##*) }
    rest=${rest#* }
    case $pid in '' | *[!0-9]*) ;; *) parent[$pid]=${rest%% *} ;; esac
  done
  inside[$1]=1
  while (( more )); do
    more=0
    for pid in "${!parent[@]}"; do
      if [ -z "${inside[$pid]-}" ] && [ "$pid" != "$2" ] && [ -n "${inside[${parent[$pid]}]-}" ]; then
        inside[$pid]=1 more=1
      fi
    done
  done
  unset "inside[$1]"
  if [ -n "${SLURM_JOB_ID-}" ] && [ -z "${_m_in_group-}" ]; then
    for pid in "${!parent[@]}"; do
      { IFS= read -r -d '' group < "/proc/$pid/cgroup"; } 2>/dev/null
      case $group in
        *"/job_$SLURM_JOB_ID/step_batch"*) ;;
        *"/job_$SLURM_JOB_ID/step_"*) inside[$pid]=1 ;;
      esac
    done
  fi
  _m_pids=("${!inside[@]}")
}

# Makes a rule's own directory for temporary files, and exports TMPDIR, its absolute path. $1 is the
# workspace; then texts and names of the node's variables follow in turn, of which the path consists.
# Fails with the reason in _m_reason.
_m_make_tmpdir() {
  local path='' base=$1
  shift
  while (( $# )); do
    path+=$1
    if (( $# > 1 )); then
      _m_reason="the resource tmpdir names $2, a variable that this node does not set"
      [ -n "${!2-}" ] || return
      path+=${!2}
      shift
    fi
    shift
  done
  case $path in (/*) ;; (*) path=$base/$path ;; esac
  export TMPDIR=$path
  _m_reason="the directory $TMPDIR of the resource tmpdir cannot be made on this node"
  mkdir -p -- "$TMPDIR"
}

# Defines `module` if the node's shells do not have it already; fails if the node has none.
_m_find_module() {
  local file
  type module > /dev/null 2>&1 && return
  # Try the files that the environment names first, then the usual ones.
  for file in ${LMOD_PKG:+"$LMOD_PKG/init/bash"} ${MODULESHOME:+"$MODULESHOME/init/bash"} \
    /etc/profile.d/modules.sh /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh \
    /usr/share/lmod/lmod/init/bash /usr/share/Modules/init/bash /usr/share/modules/init/bash; do
    [ -r "$file" ] && . "$file"
    type module > /dev/null 2>&1 && return
  done
  return 1
}

# Sets _m_bound to the path $1, escaped for Apptainer. With a workspace all that lies above it for its
# jobs is bound.
_m_bindable() {
  set -- "${1%"$_m_below_top"}"
  _m_bound=${1//\\/\\\\} _m_bound=${_m_bound//,/\\,} _m_bound=${_m_bound//:/\\:}
}

