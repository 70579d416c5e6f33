# ---- outputs -------------------------------------------------------------------------------------
# `_m_outputs` has kind, flags and path of each: `d` a directory, `k` an old one is kept, `s` it stays
# here: listed with its checksums, but neither in the marker nor in an archive; `-` none of these.

declare -A _m_places=()  # the paths that stay here, files and directories

_m_prepare_outputs() {
  local i folder path
  local -a files=() trees=() parents=()
  if [ -n "${_m_storage_link-}" ]; then
    # Commands name outputs that stay here by this directory.
    [ -L "$_m_storage_link" ] || {
      rmdir -- "$_m_storage_link" || :
      mkdir -p -- "${_m_storage_link%/*}" && ln -sT -- "$_m_storage_target" "$_m_storage_link"
    } 2>/dev/null || [ -L "$_m_storage_link" ] || _m_fail "cannot make the link $_m_storage_link"
  fi
  for (( i = 0; i < ${#_m_outputs[@]}; i += 3 )); do
    path=${_m_outputs[i + 2]}
    [[ -e $path || -L $path ]] || continue
    case ${_m_outputs[i + 1]} in *k*) ;; *d*) trees+=("$path") ;; *) files+=("$path") ;; esac
  done
  if (( ${#trees[@]} )); then
    printf '%s\0' "${trees[@]}" | xargs -0 rm -rf -- || _m_fail "cannot remove old outputs"
  fi
  if (( ${#files[@]} )); then
    printf '%s\0' "${files[@]}" | xargs -0 rm -f -- || _m_fail "cannot remove old outputs"
  fi
  # Make directories only after all removals: one output may be a directory with another one in it.
  for (( i = 0; i < ${#_m_outputs[@]}; i += 3 )); do
    folder=${_m_outputs[i + 2]%/*}
    [ -z "$folder" ] || [ -d "$folder" ] || parents+=("$folder")
  done
  if (( ${#parents[@]} )); then
    printf '%s\0' "${parents[@]}" | xargs -0 mkdir -p -- ||
      _m_fail "cannot make the directories of the outputs"
  fi
}

# ---- end -----------------------------------------------------------------------------------------

_m_safe_name() {  # fails if the site's file API cannot transfer it; it then goes into the archive
  case $1 in *[!\ -~]* | *[%\'\\\$\`\"]*) return 1 ;; esac
}

# Lists the job's outputs: sets _m_type, _m_size, _m_mode, _m_time, _m_target, _m_path, _m_lacking, and
# _m_begun, when the command began.
_m_survey() {
  local i kind path folder until=$(( SECONDS + _m_visible_s )) found=$_m_work/marker/found
  local -a there outer=()
  local -A whole=()
  _m_places=()
  _m_type=() _m_size=() _m_mode=() _m_time=() _m_target=() _m_path=() _m_begun=
  while :; do
    there=() _m_lacking=()
    for (( i = 0; i < ${#_m_outputs[@]}; i += 3 )); do
      kind=${_m_outputs[i]} path=${_m_outputs[i + 2]}
      case ${_m_outputs[i + 1]} in *s*) _m_places[$path]=yes ;; esac
      if [ "$kind" = checkpoint ]; then
        [ "$_m_code" != 0 ] && [ -n "$_m_go_on$_m_signal" ] && [ -e "$path" ] || continue
        _m_places[$path]=yes there+=("$path")
        continue
      fi
      [ "$_m_code" = 0 ] || [ "$kind" = log ] || [[ -n ${_m_incomplete-} && -e $path ]] || continue
      if [ -e "$path" ]; then there+=("$path")
      elif [ "$kind" = output ]; then _m_lacking+=("$path"); fi
    done
    (( ${#_m_lacking[@]} && SECONDS < until )) && [ -z "$_m_signal" ] || break
    sleep 0.5
  done
  : > "$found" || return
  [ ! -e "$_m_work/begun" ] || outer=("$_m_work/begun")
  for path in ${there[@]+"${there[@]}"}; do [ ! -d "$path" ] || whole[$path]=yes; done
  # An output inside another one, a directory, is listed with that directory.
  for path in ${there[@]+"${there[@]}"}; do
    folder=$path
    while (( ${#whole[@]} )) && [[ $folder == */* ]]; do
      folder=${folder%/*}
      [ -z "$folder" ] || [ -z "${whole[$folder]+yes}" ] || continue 2
    done
    outer+=("$path")
  done
  for (( i = 0; i < ${#outer[@]}; i += 500 )); do
    find -H "${outer[@]:i:500}" -printf '%y\0%s\0%m\0%T@\0%l\0%p\0' >> "$found" || return
  done
  local type size mode time target
  while IFS= read -r -d '' type && IFS= read -r -d '' size && IFS= read -r -d '' mode &&
    IFS= read -r -d '' time && IFS= read -r -d '' target && IFS= read -r -d '' path; do
    if [ "$path" = "$_m_work/begun" ]; then _m_begun=$time; continue; fi
    case $type in f | d | l) ;; *) continue ;; esac
    _m_type+=("$type") _m_size+=("$size") _m_mode+=("$mode") _m_time+=("$time")
    _m_target+=("$target") _m_path+=("$path")
  done < "$found"
}

# Sets _m_sum for all files, and records the checksums of large ones. After a success, a signal
# stops this: a late marker is worse than one without checksums.
_m_checksums() {
  local i j number
  local -a which=() paths=() _m_sums _m_stamp=()
  _m_sum=()
  for (( i = 0; i < ${#_m_path[@]}; i++ )); do
    [ "${_m_type[i]}" = f ] || continue
    which+=("$i") paths+=("${_m_path[i]}")
    (( _m_size[i] <= _m_small_bytes )) ||
      _m_stamp[i]=$(_m_stamp_of "${_m_path[i]}")
  done
  for (( i = 0; i < ${#paths[@]}; i += 500 )); do
    [ -z "$_m_signal" ] || [ "$_m_code" != 0 ] || return
    _m_read_sums "${paths[@]:i:500}"
    (( ${#_m_sums[@]} )) || return
    for (( j = 0; j < ${#_m_sums[@]}; j++ )); do
      number=${which[i + j]}
      _m_sum[number]=${_m_sums[j]}
      (( _m_size[number] <= _m_small_bytes )) ||
        _m_say_known "${_m_sums[j]:0:_m_sum_digits}" "${_m_stamp[number]}" "${_m_path[number]}"
    done
  done
}

# Decides where each file goes and writes the lists: into the marker, into the archive, or alone.
_m_sort_out() {
  local level=$1 left=$_m_marker_bytes i place size staging=$_m_work/marker
  [ "$level" = full ] || left=-1
  _m_archived=0
  {
    for (( i = 0; i < ${#_m_path[@]}; i++ )); do
      size=${_m_size[i]}
      if [ "${_m_type[i]}" != f ]; then
        place=none
      elif (( ${#_m_places[@]} )) && _m_is_placed "${_m_path[i]}"; then
        place=stored
      elif (( size <= left )); then
        place=marker
        (( left -= size ))
        printf '%s\0' "${_m_path[i]}" >&8
      elif [ "$level" != listed ] &&
        { (( size <= _m_archive_file_bytes )) || ! _m_safe_name "${_m_path[i]}"; }; then
        place=archive
        _m_archived=1
        printf '%s\0' "${_m_path[i]}" >&9
      else
        place=alone
      fi
      printf '%s\0' "$place" "${_m_type[i]}" "$size" "${_m_mode[i]}" "${_m_sum[i]-}" \
        "${_m_target[i]}" "${_m_time[i]}" "${_m_path[i]#./}"
    done
  } > "$staging/files" 8> "$staging/small" 9> "$staging/larger"
}

_m_make_archive() {
  local archive=$_m_work/outputs.tar line
  _m_archive_size=0 _m_archive_sum=
  (( _m_archived )) || return 0
  tar -cf "$archive" --format=gnu -P -h --hard-dereference --no-recursion --null \
    -T "$_m_work/marker/larger"
  (( $? < 2 )) || return  # 1: a file changed meanwhile; the checksums show it
  _m_archive_size=$(stat -c %s -- "$archive") || return
  line=$(sha256sum -- "$archive") || return
  _m_archive_sum=${line%% *}
}

# ---- undeclared files ----------------------------------------------------------------------------
# Lists files that are new since the command began and are no outputs of the job: in the directories
# of its outputs, and in the first levels of the working directory. Another job that runs at the same
# time may have made some of them. Leaves out hidden files and those of __pycache__. Takes a few seconds
# at most, and looks at no more names than are few beside the time that the job ran: else the last of
# many short jobs in one directory would look at what all of them have made.

# Sets _m_since to the moment at which the command began, as find takes it. It is slightly too early,
# since clocks of file systems tick: the command may have made a file in the same tick.
_m_set_since() {
  case ${_m_begun#*.} in
    000*) _m_since=$(( ${_m_begun%.*} - 1 )).999 ;;
    *) _m_since=${_m_begun#*.}; _m_since=${_m_begun%.*}.${_m_since:0:3} ;;
  esac
}

# Starts find with the arguments, which print a dot for each name and NUL before what they find.
# `_m_found` waits for the next find, and `_m_next` reads a field of it, for 3 s in all.
_m_search() {
  exec {_m_fields}< <(printf '%s\0' "$BASHPID"; exec find "$@" 2> /dev/null)
  _m_until=$(( SECONDS + 3 )) _m_names=$(( ${_m_ended%.*} - ${_m_started%.*} ))
  _m_names=$(( 5000 + 1000 * (_m_names > 0 ? _m_names : 0) ))  # clocks are set back
  IFS= read -r -d '' -u "$_m_fields" _m_finder
}

_m_next() { (( SECONDS <= _m_until )) && IFS= read -r -t 3 "${@:2}" -d '' -u "$_m_fields" "$1"; }

_m_found() {
  local dots=
  _m_next dots -n "$_m_names" && (( (_m_names -= ${#dots}) > 0 ))
}

_m_end_search() {
  (( SECONDS <= _m_until && _m_names > 0 )) || kill "$_m_finder" 2> /dev/null
  exec {_m_fields}<&-
}

_m_find_undeclared() {
  local n=0
  local i path size time mode _m_since _m_fields _m_finder _m_until _m_names
  local -a folders=(.)
  local -A _m_places=() near=([.]=yes)
  : > "$_m_work/marker/new" || return
  [ "$_m_code" = 0 ] && [ -z "$_m_signal" ] && [ -n "$_m_begun" ] && _m_set_since || return 0
  for (( i = 2; i < ${#_m_inputs[@]}; i += 3 )); do _m_places[${_m_inputs[i]}]=yes; done
  for (( i = 2; i < ${#_m_outputs[@]}; i += 3 )); do
    _m_places[${_m_outputs[i]}]=yes
    path=${_m_outputs[i]%/*}
    case $path in ./.mantik/up/*/*) ;; ./.* | /*) continue ;; esac
    if [ -z "${near[$path]+yes}" ] && (( ${#near[@]} < 100 )) && [ -d "$path" ]; then
      near[$path]=yes folders+=("$path")
    fi
  done
  near=()
  for path in "${folders[@]}"; do _m_is_placed "$path" || near[$path]=yes; done
  # A new file changes its directory, of which archives may set back the time of modification.
  _m_search "${folders[@]}" -maxdepth 3 -mindepth 1 '(' -name '.*' -o -name __pycache__ ')' -prune \
    -o -printf . -type d -newerct "@$_m_since" -printf '\0%p\0'
  while (( ${#near[@]} < 500 )) && _m_found && _m_next path; do
    [ -n "${near[$path]+yes}" ] || _m_is_placed "$path" || near[$path]=yes
  done
  _m_end_search
  (( ${#near[@]} && _m_names > 0 )) || return 0
  _m_search "${!near[@]}" -mindepth 1 -maxdepth 1 ! -name '.*' -type f -printf . \
    -newerct "@$_m_since" -printf '\0%s\0%T@\0%m\0%p\0'
  while _m_found && _m_next size && _m_next time && _m_next mode && _m_next path; do
    ! _m_is_placed "$path" || continue
    (( n++ < 500 )) || break
    printf '%s\0' "$size" "$time" "$mode" "${path#./}" >&7 || { : > "$_m_work/marker/new"; break; }
  done 7>> "$_m_work/marker/new"
  _m_end_search
  return 0
}

# ---- marker --------------------------------------------------------------------------------------

_m_write_meta() {
  # A signal after a success does not undo it. One after a failure may be its cause: a scheduler
  # signals one process after the other, and the command may have been the first.
  local by=
  (( _m_code == 0 )) || by=$_m_signal
  printf '%s=%s\n' version 1 attempt "$_m_attempt" exit_code "$_m_code" failed_step "$_m_failed_step" \
    signal "$by" started "$_m_started" ended "$_m_ended" host "${_m_host//$'\n'/ }" \
    scheduler_job "${_m_scheduler_job//$'\n'/ }" site_job "${_m_site_job//$'\n'/ }" \
    cpu "$_m_cpu" memory "$_m_memory" gpus "${_m_gpu_use-}" go_on "$_m_go_on" \
    changed "$_m_changed" nodes "${_m_segments:+${SLURM_JOB_NODELIST-}}" "$@" > "$_m_work/marker/meta"
}

# Tries once to write the marker, with the content of level $1.
_m_marker_at() {
  local level=$1 staging=$_m_work/marker new=$_m_attempts/.$_m_attempt.tmp log_bytes=0
  local -a what=(meta)
  case $level in
    full | lean | listed)
      _m_sort_out "$level" && _m_make_archive || return
      : > "$staging/lacking" || return
      (( ${#_m_lacking[@]} == 0 )) || printf '%s\0' "${_m_lacking[@]#./}" > "$staging/lacking" || return
      : > "$staging/log" || return
      if [ -s "$_m_work/log" ]; then
        tail -c "$_m_log_tail_bytes" "$_m_work/log" > "$staging/log" || return
        log_bytes=$(stat -c %s -- "$_m_work/log") || return
      fi
      _m_write_meta files "${#_m_path[@]}" lacking "${#_m_lacking[@]}" \
        archive_size "$_m_archive_size" archive_sha256 "$_m_archive_sum" \
        log_bytes "$log_bytes" || return
      what=(meta missing lacking files new log)
      [ -e "$staging/missing" ] || : > "$staging/missing" || return
      [ -e "$staging/new" ] || : > "$staging/new" || return
      tar -czf "$new" --format=gnu -P -h --hard-dereference --no-recursion -C "$_m_home/$staging" \
        "${what[@]}" -C "$_m_home" --null -T "$staging/small" || return ;;
    bare)
      rm -rf -- "$staging" "$_m_work/outputs.tar" "$new"
      mkdir -- "$staging" && _m_write_meta && tar -czf "$new" -C "$staging" meta || return ;;
  esac
  mv -T -- "$new" "$_m_claim.$_m_code"
}

# Writes the marker. Its name alone says how the job ended. If there is no room for its content, it
# holds less: no small outputs (lean), nor an archive beside it (listed), no lists (bare), nothing.
# As a last resort it is a hard link to the claim, which takes no room.
_m_make_marker() {
  local level
  export LC_ALL=C
  trap '' XFSZ
  umask "$_m_own_umask"
  _m_sum=()
  if _m_survey; then
    _m_find_undeclared
    _m_checksums
    for level in full lean listed; do
      _m_marker_at "$level" && return
      _m_say "cannot write the $level marker"
      rm -f -- "$_m_attempts/.$_m_attempt.tmp" "$_m_work/outputs.tar"
    done
  fi
  _m_marker_at bare && return
  rm -rf -- "$_m_work/marker" "$_m_attempts/.$_m_attempt.tmp"
  : > "$_m_claim.$_m_code" && return
  ln -T -- "$_m_claim" "$_m_claim.$_m_code"
}

