# ---- inputs --------------------------------------------------------------------------------------
# `_m_inputs` has size, checksum and path of each: `-` stands for any, `/` for a directory. A `+` after
# the checksum marks an input that the job itself changes.

# Reads the checksums of larger inputs only if their content may differ from the uploaded one.
_m_small_bytes=1048576

# A content that may arrive late has a number; newer contents have greater ones. Removes unpacked
# files older than those in the workspace, and records the numbers of the others. Two jobs may do
# this at once: the input checks before and after the command detect it.
_m_leave_newer() {
  (( ${#_m_numbers[@]} )) || [ -d .mantik/newer ] || return 0
  local path mark mine theirs i
  local -A number=()
  for (( i = 0; i < ${#_m_numbers[@]}; i += 2 )); do
    number[${_m_numbers[i + 1]}]=${_m_numbers[i]}
  done
  while IFS= read -r -d '' path; do
    mark=.mantik/newer/$path.n mine=${number[./$path]-0} theirs=0
    { IFS= read -r theirs < "$mark"; } 2>/dev/null
    case $theirs in '' | *[!0-9]*) theirs=0 ;; esac
    if (( theirs > mine )); then
      rm -f -- "$1/$path"
    elif (( mine > theirs )); then
      mkdir -p -- "${mark%/*}" && _m_replace "$mark" "$mine"
    fi 2>/dev/null
  done < <(find "$1" -mindepth 1 ! -type d -printf '%P\0')
}

# Moves the files in a directory to the same paths in the workspace. Each file is renamed into
# place, so that no other job, which may unpack or use the same files, reads half of it. A link in
# place of a directory is removed first: a job made it, and it is outdated. Unpacked links are
# replaced by copies of their targets.
_m_place() {
  local from=$1 list=$_m_work/unpack.list folder name
  find "$from" -mindepth 1 -type l -print0 > "$list" || return
  while IFS= read -r -d '' name; do
    cp -pL -- "$name" "$from.copy" && mv -f -T -- "$from.copy" "$name" || return
  done < "$list"
  find "$from" -mindepth 1 -type d -printf './%P\0' > "$list" || return
  while IFS= read -r -d '' folder; do
    case $folder in ./.mantik/up/?) continue ;; esac
    # A failure is harmless: another job may just have replaced it.
    [ ! -L "$folder" ] || rm -f -- "$folder" 2>/dev/null
  done < "$list"
  xargs -0 -r mkdir -p -- < "$list" || return
  _m_leave_newer "$from"
  find "$from" -mindepth 1 ! -type d -printf '%h\0%f\0' > "$list" || return
  _m_by_directory _m_move < "$list" || return
  _m_say_unpacked
  rm -rf -- "$from" "$list"
}

# Moves files from $1, a directory below `from`, into the workspace. `mv` refuses a file that another
# job has just put there from the same bundle under its own name (`_m_link_imported`).
_m_move() {
  local into=./${1#"$from"} name
  shift
  mv -f -t "$into" -- "$@" 2>/dev/null && return
  for name; do
    [ ! -e "$name" ] || [ "$name" -ef "$into/${name##*/}" ] || mv -f -t "$into" -- "$name" ||
      [ "$name" -ef "$into/${name##*/}" ] || return
  done
}

# Records the checksums of large inputs just unpacked; gzip's own check has verified the content.
# Those from other places are read once more: their upload may have begun in an earlier run, which
# knew only a part of their content. `_m_moved` has their indices.
_m_say_unpacked() {
  local i path
  local -A large=()
  for (( i = 0; i < ${#_m_inputs[@]}; i += 3 )); do
    case ${_m_inputs[i]}${_m_inputs[i + 1]} in /* | -* | *-) continue ;; esac
    case " ${_m_moved-} " in *" $i "*) continue ;; esac
    (( _m_inputs[i] <= _m_small_bytes )) || large[${_m_inputs[i + 2]}]=${_m_inputs[i + 1]%+}
  done
  (( ${#large[@]} )) || return 0
  while IFS= read -r -d '' folder && IFS= read -r -d '' name; do
    path=.${folder#"$from"}/$name
    [ -z "${large[$path]-}" ] || _m_say_known "${large[$path]}" "$(_m_stamp_of "$path")" "$path"
  done < "$list"
}

_m_unpack_bundle() {
  local into=$_m_work/unpack said=$_m_work/unpack.err until=$(( SECONDS + _m_visible_s ))
  [ -e "$2" ] && return
  rm -rf -- "$into" && mkdir -m 700 -- "$into" || _m_fail "cannot make $into"
  : > "$said" || _m_fail "cannot write $said"
  _m_read_bundle "$1" 2>> "$said" |
    tar -xzf - -C "$into" --no-same-owner --no-same-permissions 2>> "$said"
  if ! { [[ "${PIPESTATUS[*]}" =~ ^0\ 0$ ]] && { [ -f "$1" ] || _m_link_imported "$1" "$into"; }; }
  then
    # Another job may have unpacked it meanwhile, and removed its parts.
    while [ -d "$1" ] || [ ! -e "$1" ]; do
      [ ! -e "$2" ] || { rm -rf -- "$into"; return; }
      (( SECONDS < until )) || break
      sleep 0.5
    done
    cat -- "$said" >&2
    _m_fail "cannot unpack $1: it is missing or damaged"
  fi
  _m_place "$into" || _m_fail "cannot put the files of $1 into the workspace"
  : > "$2" || _m_fail "cannot write $2"
  [ ! -d "$1" ] || rm -rf -- "$1"
}

# Replaces the links in $2 to `.mantik/imported/MODE/NAME` by files of the bundle's directory $1,
# which the site's server has fetched from another one. They stay there for jobs that unpack it now.
_m_link_imported() {
  local list=$_m_work/imported.list link target file mode
  find "$2" -type l -lname '.mantik/imported/*' -print0 > "$list" || return
  while IFS= read -r -d '' link; do
    target=$(readlink -- "$link") && file=$1/imported/${target##*/} || return
    mode=${target%/*} mode=$(printf %o $(( 8#${mode##*/} & ~8#$(umask) )))
    touch -h -r "$link" -- "$file" && chmod "$mode" -- "$file" && {
      ln -f -- "$file" "$link" || cp -p --remove-destination -- "$file" "$link"
    } || return
  done < "$list" 2>> "$_m_work/unpack.err"
  rm -f -- "$list"
}

# Prints a bundle: a file, or a directory of parts that are named NUMBER-of-COUNT. Each part is
# compressed by itself, so that gzip notices a damaged one, but not one that is missing or empty.
_m_read_bundle() {
  local part
  local -a parts
  [ -d "$1" ] || { cat -- "$1"; return; }
  parts=("$1"/[0-9]*-of-*)
  for part in "${parts[@]}"; do [ -s "$part" ] || return; done
  (( 10#${parts[0]##*-} == ${#parts[@]} )) || return
  printf '%s\0' "${parts[@]}" | xargs -0 cat --
}

_m_unpack_inline() {
  local into=$_m_work/unpack
  rm -rf -- "$into" && mkdir -m 700 -- "$into" || _m_fail "cannot make $into"
  _m_inline | tar -xzf - -C "$into" --no-same-owner --no-same-permissions
  [[ "${PIPESTATUS[*]}" =~ ^0\ 0$ ]] || _m_fail "cannot unpack the files that came with the script"
  _m_place "$into" || _m_fail "cannot put the files that came with the script into the workspace"
}

_m_unpack() {
  local i
  for (( i = 0; i < ${#_m_bundles[@]}; i += 2 )); do
    _m_unpack_bundle "${_m_bundles[i]}" "${_m_bundles[i + 1]}"
  done
  ! declare -F _m_inline > /dev/null || _m_unpack_inline
}

# Sets _m_absent to the inputs that are missing or have another size.
_m_find_absent() {
  local i j want path
  local -a paths=() wants=() sizes
  _m_absent=()
  for (( i = 0; i < ${#_m_inputs[@]}; i += 3 )); do
    want=${_m_inputs[i]} path=${_m_inputs[i + 2]}
    case $want in
      /) [ -d "$path" ] || _m_absent+=("$path") ;;
      -) [ -e "$path" ] || _m_absent+=("$path") ;;
      *) if [ -f "$path" ]; then paths+=("$path") wants+=("$want")
         else _m_absent+=("$path"); fi ;;
    esac
  done
  for (( i = 0; i < ${#paths[@]}; i += 500 )); do
    mapfile -t sizes < <(stat -L -c %s -- "${paths[@]:i:500}")
    for (( j = i; j < ${#paths[@]} && j < i + 500; j++ )); do
      [ "${sizes[j - i]-}" = "${wants[j]}" ] || _m_absent+=("${paths[j]}")
    done
  done
}

# Takes size, checksum and path of each file; sets _m_absent to the paths whose content differs.
_m_find_others() {
  local i j mark known stamp
  local -a sums=() small=() _m_sums
  _m_absent=()
  while (( $# )); do
    if (( $1 <= _m_small_bytes )); then
      sums+=("$2") small+=("$3")
    else
      # The job that wrote or fully read it recorded its checksum and stamp.
      mark=.mantik/known/${3#./}.k known=
      stamp=$(_m_stamp_of "$3")
      { IFS= read -r known < "$mark"; } 2>/dev/null
      if [ "$known" != "$2 $stamp" ]; then
        _m_read_sums "$3"
        if [ "${_m_sums[0]:0:_m_sum_digits}" = "$2" ]; then _m_say_known "$2" "$stamp" "$3"
        else _m_absent+=("$3"); fi
      fi
    fi
    shift 3
  done
  for (( i = 0; i < ${#small[@]}; i += 500 )); do
    _m_read_sums "${small[@]:i:500}"
    for (( j = i; j < ${#small[@]} && j < i + 500; j++ )); do
      [ "${_m_sums[j - i]:0:_m_sum_digits}" = "${sums[j]}" ] || _m_absent+=("${small[j]}")
    done
  done
}

# Prints the stamp of a file, which changes whenever the content does.
_m_stamp_of() { stat -L -c '%s %i %.Y %.Z' -- "$1"; }

# Records the checksum $1 of the large file $3, if it still has the stamp $2 from before reading.
_m_say_known() {
  local mark=.mantik/known/${3#./}.k
  [ "$(_m_stamp_of "$3")" = "$2" ] && mkdir -p -- "${mark%/*}" && _m_replace "$mark" "$1 $2"
} 2>/dev/null

# Sets _m_sent to the arguments of `_m_find_others` for the inputs at given indices of _m_inputs.
_m_list_sent() {
  local i
  _m_sent=()
  for i; do
    case ${_m_inputs[i]}${_m_inputs[i + 1]} in
      /* | -* | *-) ;;
      *) _m_sent+=("${_m_inputs[i]}" "${_m_inputs[i + 1]%+}" "${_m_inputs[i + 2]}") ;;
    esac
  done
}

# Waits until all inputs have the submitted content. Another node may just have written them, and
# network file systems show that with a delay.
_m_check_inputs() {
  local until=$(( SECONDS + _m_visible_s )) i
  local -a _m_sent all=()
  for (( i = 0; i < ${#_m_inputs[@]}; i += 3 )); do all+=("$i"); done
  _m_list_sent ${all[@]+"${all[@]}"}
  while :; do
    _m_find_absent
    if (( ! ${#_m_absent[@]} )); then
      _m_find_others ${_m_sent[@]+"${_m_sent[@]}"}
      (( ${#_m_absent[@]} )) || break
      # The sizes have arrived: one more look suffices.
      (( SECONDS + 1 < until )) && until=$(( SECONDS + 1 ))
    fi
    (( SECONDS < until )) || _m_fail_inputs "these inputs are missing or others than were sent"
    sleep 0.5
  done
  _m_inodes > "$_m_work/inodes"
}

# Checks that the inputs are still there: making the environment may have taken long, and a command
# may pass over what is gone, such as a file of a directory.
_m_check_again() {
  local i path IFS=$' \t\n'
  local -A gone=()
  cd -- "$_m_workspace" || _m_fail "there is no workspace $_m_workspace"
  _m_find_absent
  (( ${#_m_absent[@]} )) || return 0
  for path in "${_m_absent[@]}"; do gone[$path]=yes; done
  _m_absent=()
  for (( i = 0; i < ${#_m_inputs[@]}; i += 3 )); do
    path=${_m_inputs[i + 2]}
    [ -n "${gone[$path]+yes}" ] || continue
    case ${_m_inputs[i + 1]} in *+) ;; *) _m_absent+=("$path") ;; esac
  done
  (( ! ${#_m_absent[@]} )) || _m_fail_inputs "these inputs have disappeared or changed since the job started"
}

_m_fail_inputs() {
  printf '%s\0' "${_m_absent[@]#./}" > "$_m_work/marker/missing"
  printf '  %q\n' "${_m_absent[@]#./}" >&2
  _m_fail "$1"
}

# Prints the inode of each input, or `-` if it is missing. A file renamed into the workspace has a
# new inode.
_m_inodes() {
  local i path found
  local -a paths=()
  for (( i = 0; i < ${#_m_inputs[@]}; i += 3 )); do paths+=("${_m_inputs[i + 2]}"); done
  for (( i = 0; i < ${#paths[@]}; i += 500 )); do
    if found=$(stat -L -c %i -- "${paths[@]:i:500}"); then
      printf '%s\n' "$found"
    else
      for path in "${paths[@]:i:500}"; do stat -L -c %i -- "$path" || echo -; done
    fi
  done
} 2>/dev/null

# Sets _m_absent to the inputs whose content another job replaced while the command ran. The job's
# outputs would otherwise be recorded as made from the submitted content.
_m_find_replaced() {
  local i
  local -a before=() now=() replaced=() _m_sent
  _m_absent=()
  [ -s "$_m_work/inodes" ] || return 0
  mapfile -t before < "$_m_work/inodes"
  mapfile -t now < <(_m_inodes)
  for (( i = 0; i < ${#now[@]}; i++ )); do
    # The command itself removed a missing one.
    [ "${now[i]}" = "${before[i]-}" ] || [ "${now[i]}" = - ] && continue
    case ${_m_inputs[3 * i + 1]} in *+) ;; *) replaced+=("$(( 3 * i ))") ;; esac
  done
  (( ${#replaced[@]} )) || return 0
  _m_list_sent "${replaced[@]}"
  _m_find_others ${_m_sent[@]+"${_m_sent[@]}"}
}

# ---- predecessors --------------------------------------------------------------------------------
# This attempt was submitted before the jobs that make some of its inputs had ended. It runs only if the
# attempts that make them have succeeded, and checks that the files are those that their markers list. The
# scheduler's dependency does not count: a scheduler forgets ended jobs, and takes it for fulfilled then.
# `_m_predecessors` has, for each of them, the exit code with which it succeeds, its claim, the number of
# inputs that it makes, and these.

_m_check_predecessors() {
  local i
  : > "$_m_work/made" || _m_fail "cannot write $_m_work/made"
  for (( i = 0; i < ${#_m_predecessors[@]}; i += 3 + _m_predecessors[i + 2] )); do
    _m_check_predecessor "${_m_predecessors[@]:i:2}" "${_m_predecessors[@]:i + 3:_m_predecessors[i + 2]}"
  done
  _m_add_made
}

# Takes the exit code with which an attempt succeeds, its claim, and the inputs that it makes. Appends size,
# checksum and path of each file to the list of these. The exit code of a segment is not 0: it need not
# have made all, and the job itself changes them.
_m_check_predecessor() {
  local code=$1 claim=$2 until=$(( SECONDS + _m_visible_s )) list=$_m_work/made.list
  local place type size mode sum target time path folder changed=
  local -A wanted=()
  shift 2
  until [ -s "$claim.$code" ]; do
    if compgen -G "$claim.[0-9]*" | grep -Fqvx -e "$claim.$code" || (( SECONDS >= until )); then
      (( ! code )) || _m_fail "the segment before does not ask for another one"
      _m_fail "the job that makes $* has not succeeded"
    fi
    sleep 0.5
  done
  (( ! code )) || changed=+
  for path; do wanted[$path]=no; done
  tar -xzOf "$claim.$code" files > "$list" || _m_fail "cannot read which files were made: $claim.$code"
  while IFS= read -r -d '' place && IFS= read -r -d '' type && IFS= read -r -d '' size &&
    IFS= read -r -d '' mode && IFS= read -r -d '' sum && IFS= read -r -d '' target &&
    IFS= read -r -d '' time && IFS= read -r -d '' path; do
    case $path in /*) ;; *) path=./$path ;; esac
    folder=$path
    while [ -z "${wanted[$folder]+yes}" ]; do
      case $folder in ?*/*) folder=${folder%/*} ;; *) continue 2 ;; esac
    done
    wanted[$folder]=yes
    case $type in
      f) printf '%s\0' "$size" "${sum:0:_m_sum_digits}${sum:+$changed}" "$path" ;;
      d) printf '%s\0' / - "$path" ;;
    esac
  done < "$list" >> "$_m_work/made"
  (( ! code )) || return 0
  for path; do
    [ "${wanted[$path]}" = yes ] || _m_fail "the job that makes $path has not made it"
    # Snakemake does this when it has accepted a directory(): commands may list what is in it.
    [ ! -d "$path" ] || [ -e "$path/.snakemake_timestamp" ] || : > "$path/.snakemake_timestamp"
  done
}

# Adds the files that the predecessors have made to _m_inputs.
_m_add_made() {
  local size sum path
  while IFS= read -r -d '' size && IFS= read -r -d '' sum && IFS= read -r -d '' path; do
    _m_inputs+=("$size" "${sum:--}" "$path")
  done < "$_m_work/made"
} 2>/dev/null

