# ---- the agent of a pool -------------------------------------------------------------------------
# Runs jobs side by side on one node of an allocation, until nothing has been there for a while. Of an
# allocation of several nodes each has an agent, whose names are <allocation>+<number>.
# The pool is a flat directory, in which a name changes by one rename, so that one listing shows all:
#
#   in.<cpus>.<bytes>.<unique>                          jobs that came together, until one unpacks them
#   ready.<order>.<cpus>.<MiB>.<gpus>.<seconds>.<login>.<bucket>.<job>   the script of one that waits
#   behind.<the same>                                   one that waits for the ends of others: the second
#                                                       line of its script has these as <bucket>/<job>
#   run.<allocation>.<job>                              one that an allocation has taken
#   done.<how>.<job>                                    one that has ended, unless its marker says that it
#                                                       succeeded: how is its exit code, `time` (its
#                                                       walltime), `stop` (it was cancelled), or `pool`
#                                                       (the allocation was ended)
#   stop.<job>                                          a request to end a job
#   marks.<allocation>.<number>                         markers of jobs, to be read at once
#   pool.<allocation>                                   an allocation that was requested, or runs
#   used.<allocation>.<node>.<seconds>.<core seconds>   how long an agent has been there, and what jobs
#                                                       have had of that

# Of jobs that are behind others: those others, by file; by job, the files that wait for it alone or
# first; and which jobs have not ended, as the directory shows.
declare -A _p_behind=() _p_followers=() _p_open=()

# Lists the numbers of the CPUs that this process may use, at most those of the pool.
_p_find_cpus() {
  local list part i
  _p_cpu_ids=()
  command -v taskset > /dev/null && list=$(taskset -cp $$ 2> /dev/null) || return
  list=${list##*:}
  for part in ${list//,/ }; do
    for (( i = ${part%-*}; i <= ${part#*-} && ${#_p_cpu_ids[@]} < _p_cpus; i++ )); do
      _p_cpu_ids+=("$i")
    done
  done
  (( ${#_p_cpu_ids[@]} == _p_cpus )) || _p_cpu_ids=()  # pinned to fewer, jobs would share them
}

_p_find_gpus() {
  local list=${CUDA_VISIBLE_DEVICES-${ROCR_VISIBLE_DEVICES-}} i
  IFS=, read -r -a _p_gpu_ids <<< "$list"
  for (( i = ${#_p_gpu_ids[@]}; i < _p_gpus; i++ )); do _p_gpu_ids+=("$i"); done
}

# Unpacks the jobs that came together, in a gzipped tar whose name has its size: one that is not all
# there yet stays.
_p_unpack() {
  local file mine size
  for file in in.*; do
    # Others may write to a shared workspace: only the user's own jobs run.
    [ -O "$file" ] || continue
    size=${file#in.*.}
    if [ "$(stat -c %s -- "$file" 2> /dev/null)" != "${size%%.*}" ]; then
      find "./$file" -mmin +10 -delete 2> /dev/null  # nobody sends the rest of it any more
      continue
    fi
    mine=.unpack.$_p_alloc.${file#in.}
    mv -T -- "$file" "$mine" 2> /dev/null || continue
    mkdir -- "$mine.jobs" && tar -xzmf "$mine" --no-same-owner -C "$mine.jobs" &&
      find "$mine.jobs" -type f -exec mv -t . -- {} +
    rm -rf -- "$mine" "$mine.jobs"
    _p_listed=
  done
}

# Lets what agents were unpacking that are not there any more be unpacked again: what was taken of it
# meanwhile has its claim. Removes what else of them is old.
_p_tidy() {
  local file owner
  local -a old=()
  for file in .unpack.*.*.*.*; do
    owner=${file#.unpack.} owner=${owner%%.*}
    [ "$owner" != "$_p_alloc" ] && [ -e "pool.${owner%+*}" ] && continue
    case $file in
      *.jobs) rm -rf -- "$file" ;;
      *) mv -T -- "$file" "in.${file#.unpack."$owner".}" ;;
    esac
  done
  for file in run.*; do
    owner=${file#run.} owner=${owner%%.*}
    [ -e "pool.${owner%+*}" ] || old+=("./$file")
  done
  find . -maxdepth 1 '(' -name 'done.*' -o -name 'used.*' -o -name '.marks.*' ')' -mtime +30 -delete
  (( ! ${#old[@]} )) || find "${old[@]}" -maxdepth 0 -mtime +30 -delete
} 2> /dev/null

# Succeeds if the job $1, BUCKET/JOB, has ended: it has a marker, or a file says how. One that ended with
# its allocation is submitted again.
_p_is_over() {
  local -a found
  [ -z "${_p_open[${1##*/}]-}" ] || return
  found=(../../attempts/"$1".[0-9]* done.[!p]*."${1##*/}")
  (( ${#found[@]} ))
}

# Makes the job in the file $1 ready unless one that it is behind has not ended, whose follower it is
# then. Whether those have succeeded, and have made its inputs, its script looks.
_p_promote() {
  local before
  for before in ${_p_behind[$1]}; do
    if ! _p_is_over "$before"; then
      _p_followers[${before##*/}]+=" $1"
      return
    fi
  done
  unset "_p_behind[$1]"
  mv -T -- "$1" "ready.${1#behind.}" 2> /dev/null && _p_ready+=("ready.${1#behind.}") && _p_look=yes
}

# Looks at all jobs that are behind others. Where jobs end here, `_p_reap` looks at their followers.
_p_read_behind() {
  local file before owner
  local -a files=(behind.*)
  _p_followers=() _p_open=()
  (( ${#files[@]} )) || return
  for file in "${files[@]}" ready.* run."$_p_alloc".*; do _p_open[${file##*.}]=yes; done
  for file in run.*; do  # an agent may have died between the end of its job and that of the file
    owner=${file#run.} owner=${owner%%.*}
    [ ! -e "pool.${owner%+*}" ] || _p_open[${file##*.}]=yes
  done
  for file in "${_p_succeeded[@]}"; do unset "_p_open[${file##*.}]"; done
  for file in "${files[@]}"; do
    if [ -z "${_p_behind[$file]+yes}" ]; then
      { read -r _ && read -r _ _ before; } < "$file" || continue
      _p_behind[$file]=$before
    fi
    _p_promote "$file"
  done
} 2> /dev/null

# Ends what is to end, and removes what was cancelled before it was taken.
_p_read_stops() {
  local file job n
  local -a others
  for file in stop.*; do
    job=${file#stop.}
    for n in "${!_p_pids[@]}"; do
      [ "${_p_jobs[n]}" != "$job" ] || _p_end "$n" stop
    done
    others=(run.*."$job")
    [ -e "run.$_p_alloc.$job" ] || (( ! ${#others[@]} )) || continue
    rm -f -- ready.*."$job" behind.*."$job" "$file"
  done
}

# Asks the job in slot $1 to end; $2 says why.
_p_end() {
  [ -z "${_p_hows[$1]}" ] || return
  _p_hows[$1]=$2
  _p_kills[$1]=$(( _p_now + _p_grace_s ))
  kill -s TERM "${_p_pids[$1]}" 2> /dev/null
}

# Kills all processes below $1, and $1.
_p_kill() {
  local pid file
  local -a left=("$1") found=() below
  while (( ${#left[@]} )); do
    pid=${left[0]} left=("${left[@]:1}") found+=("$pid")
    for file in "/proc/$pid/task/"[0-9]*/children; do
      read -r -a below < "$file" && left+=("${below[@]}")
    done 2> /dev/null
  done
  kill -s KILL "${found[@]}" 2> /dev/null
}

# Adds up what jobs have of this agent's time, in hundredths of a second. `_p_now` is the agent's age in
# seconds: bash's own SECONDS jumps with the clock of the node.
_p_count() {
  local now
  read -r now _ < /proc/uptime
  (( now = 10#${now/./}, _p_used += (now - _p_counted) * (_p_all_cpus - _p_cpus), _p_counted = now ))
  (( _p_began )) || _p_began=$now
  (( _p_now = (now - _p_began) / 100 ))
}

# Shows how long this agent has been there, and what jobs have had of that.
_p_show_used() {
  local file=used.$_p_alloc.$_p_node.$(( (_p_counted - _p_began) / 100 )).$(( _p_used / 100 ))
  _p_used_shown=$_p_used
  [ "$file" != "$_p_used_file" ] || return
  [ -n "$_p_used_file" ] && mv -T -- "$_p_used_file" "$file" || : > "$file"
  _p_used_file=$file
} 2> /dev/null

# Shows the markers of jobs that have ended in one file, a tar, and removes the files of those that
# have succeeded. A marker that is not among them is read by itself: this only saves requests.
_p_show_marks() {
  local new=.marks.$_p_alloc
  _p_shown=$_p_counted
  # What jobs have used is there before their ends are.
  (( ${#_p_pids[@]} || _p_used == _p_used_shown )) || _p_show_used
  (( ${#_p_marked[@]} )) || return
  ( cd ../../attempts && exec find "${_p_marked[@]}" -maxdepth 0 -size "-$(( _p_mark_bytes + 1 ))c" -print0 ) |
    tar -cf "$new" --format=gnu -C ../../attempts --no-recursion --null -T - &&
    mv -T -- "$new" "marks.$_p_alloc.$(( _p_marks++ ))" || rm -f -- "$new"
  rm -f -- "${_p_succeeded[@]}"
  _p_marked=() _p_succeeded=()
}

# Frees what jobs have that have ended, and ends those whose walltime is over.
_p_reap() {
  local n code mark file
  for n in "${!_p_pids[@]}"; do
    if kill -0 "${_p_pids[n]}" 2> /dev/null; then
      (( _p_now < _p_ends[n] )) || _p_end "$n" time
      [ -z "${_p_hows[n]}" ] || (( _p_now < _p_kills[n] )) || _p_kill "${_p_pids[n]}"
      continue
    fi
    wait "${_p_pids[n]}"
    code=$?
    mark=${_p_buckets[n]}/${_p_jobs[n]}.$code file=run.$_p_alloc.${_p_jobs[n]}
    [ ! -e "../../attempts/$mark" ] || _p_marked+=("$mark")
    if [ -e "../../attempts/$mark" ] && [ "${_p_hows[n]}$code" = 0 ]; then
      _p_succeeded+=("$file")
    else
      mv -T -- "$file" "done.${_p_hows[n]:-$code}.${_p_jobs[n]}"
    fi
    (( _p_cpus += _p_taken_cpus[n], _p_memory += _p_taken_memory[n], _p_gpus += _p_taken_gpus[n] ))
    _p_cpu_ids+=(${_p_own_cpus[n]})
    _p_gpu_ids+=(${_p_own_gpus[n]})
    unset "_p_pids[n]" "_p_open[${_p_jobs[n]}]"
    for file in ${_p_followers[${_p_jobs[n]}]-}; do _p_promote "$file"; done
    _p_busy=$_p_now _p_look=yes _p_ended=yes
  done
}

# Takes the jobs that fit into what is free and into the time that is left, oldest first. The list of
# those that wait is read again every other second, or when this agent has unpacked some.
_p_take() {
  local IFS=. file n cpus memory gpus seconds login bucket job
  local -a parts
  (( ${#_p_pids[@]} )) || [ -z "$_p_ended" ] || (( ! ${#_p_behind[@]} )) || _p_listed=
  _p_ended=
  if [ -z "$_p_listed" ] || (( _p_now > _p_listed + 1 )); then
    IFS=$' \t\n' _p_read_behind
    _p_ready=(ready.*)
    _p_listed=$_p_now _p_look=yes
  fi
  [ -n "$_p_look" ] || return
  _p_look=
  for n in "${!_p_ready[@]}"; do
    (( _p_cpus > 0 )) || return
    file=${_p_ready[n]}
    parts=($file)
    cpus=${parts[2]} memory=${parts[3]} gpus=${parts[4]} seconds=${parts[5]}
    login=${parts[6]} bucket=${parts[7]} job=${parts[8]}
    # A job that requests no memory has the share of its CPUs.
    (( memory )) || (( memory = _p_all_memory * cpus / _p_all_cpus ))
    # One that requests more than any node has runs alone, rather than never.
    (( memory <= _p_all_memory )) || memory=$_p_all_memory
    (( cpus <= _p_cpus && memory <= _p_memory && gpus <= _p_gpus )) || continue
    (( _p_now + seconds + _p_grace_s <= _p_runtime_s )) || continue
    unset "_p_ready[n]"
    # What was sent twice must not end, by itself, the one that runs.
    [ ! -e "run.$_p_alloc.$job" ] || { rm -f -- "$file"; continue; }
    # Only one allocation can rename it.
    [ -O "$file" ] && mv -T -- "$file" "run.$_p_alloc.$job" 2> /dev/null || continue
    _p_start
  done
}

# Starts the job that `_p_take` has taken.
_p_start() {
  local n=$(( _p_last++ )) list
  local IFS=$' \t\n'
  local -a command=(bash) pinned=()
  [ "$login" = 0 ] || command=(bash -l)
  if (( ${#_p_cpu_ids[@]} >= cpus )); then
    pinned=("${_p_cpu_ids[@]:0:cpus}") _p_cpu_ids=("${_p_cpu_ids[@]:cpus}")
    list="${pinned[*]}"
    command=(taskset -c "${list// /,}" "${command[@]}")
  fi
  _p_own_cpus[n]=${pinned[*]-} _p_own_gpus[n]=${_p_gpu_ids[*]:0:gpus}
  _p_gpu_ids=("${_p_gpu_ids[@]:gpus}")
  (( _p_cpus -= cpus, _p_memory -= memory, _p_gpus -= gpus ))
  _p_taken_cpus[n]=$cpus _p_taken_memory[n]=$memory _p_taken_gpus[n]=$gpus
  _p_jobs[n]=$job _p_buckets[n]=$bucket _p_hows[n]='' _p_ends[n]=$(( _p_now + seconds + 1 ))
  set -m
  (
    export _m_pooled=pool.$_p_name.$job SLURM_CPUS_PER_TASK=$cpus
    (( _p_nodes == 1 )) || export SLURM_JOB_NODELIST=$_p_node SLURM_JOB_NUM_NODES=1 \
      SLURM_NODELIST=$_p_node SLURM_NNODES=1 SLURM_NTASKS=1 SLURM_NPROCS=1
    if (( _p_all_gpus )); then
      gpus=${_p_own_gpus[n]// /,}
      export CUDA_VISIBLE_DEVICES=$gpus ROCR_VISIBLE_DEVICES=$gpus
    fi
    exec "${command[@]}" "run.$_p_alloc.$job"
  ) < /dev/null {_p_tick}>&- &
  _p_pids[n]=$!
  set +m
}

# Goes on in the pool's directory where that was removed and made anew, as after a purge, and shows there
# what it runs. A file that is there, such as the script of a job that runs, is left alone.
_p_enter_again() {
  local n
  cd -- "$_p_directory" || return
  set -C
  : > "pool.${_p_alloc%+*}"
  for n in "${!_p_pids[@]}"; do : > "run.$_p_alloc.${_p_jobs[n]}"; done
  set +C
} 2> /dev/null

_p_on_signal() {
  local n
  _p_over=yes
  for n in "${!_p_pids[@]}"; do _p_end "$n" pool; done
}

_p_main() {
  local tick file
  cd -- "$_p_directory" || { echo "mantik: there is no pool $_p_directory"; exit 0; }
  shopt -s nullglob
  umask 077
  trap _p_on_signal TERM INT HUP
  trap : USR1 USR2
  _p_all_gpus=$_p_gpus _p_last=0 _p_busy=0 _p_over='' _p_listed='' _p_look='' _p_ended=''
  _p_marks=0 _p_scanned=''
  _p_pids=() _p_jobs=() _p_buckets=() _p_hows=() _p_ends=() _p_kills=() _p_ready=()
  _p_marked=() _p_succeeded=()
  (( _p_memory )) || while read -r name size _; do
    [ "$name" != MemTotal: ] || _p_memory=$(( size / 1024 ))
  done < /proc/meminfo
  _p_all_memory=$_p_memory _p_all_cpus=$_p_cpus
  _p_find_cpus
  _p_find_gpus
  # Before bash 5.1, `read -t` hangs if its time is over before it begins to wait: a line each second ends
  # that. What sends the lines ends with its reader.
  exec {_p_tick}< <(trap '' TERM INT HUP USR1 USR2; while sleep 1; do echo || exit; done)
  read -r _p_node < /proc/sys/kernel/hostname
  _p_node=${SLURMD_NODENAME:-${_p_node%%.*}}
  _p_used_file='' _p_used_shown=-1 _p_used=0 _p_counted=0 _p_shown=0 _p_began=0
  _p_count
  # What it ran before the scheduler put it back into the queue and started it again.
  for file in run."$_p_alloc".*; do mv -T -- "$file" "done.pool.${file##*.}"; done
  _p_tidy
  printf '%(%F %T)T the pool %s: %s CPUs, %s MiB, %s GPUs for %s s\n' -1 "$_p_name" "$_p_cpus" \
    "$_p_memory" "$_p_gpus" "$_p_runtime_s"
  while :; do
    _p_count
    _p_reap
    if (( _p_now != _p_scanned )); then  # a parallel file system is to have little of this
      _p_scanned=$_p_now
      [ . -ef "$_p_directory" ] || _p_enter_again
      (( _p_now % 10 )) || _p_show_used
      (( _p_now % 60 )) || { find . -maxdepth 1 -name 'marks.*' -mmin +10 -delete; _p_tidy; }
      _p_read_stops
      # A node is there as long as its allocation is.
      (( _p_nodes == 1 )) || ! compgen -G "run.${_p_alloc%+*}+*" > /dev/null || _p_busy=$_p_now
      [ -n "$_p_over" ] || _p_unpack
    fi
    (( _p_counted < _p_shown + 100 )) || _p_show_marks
    [ -n "$_p_over" ] || _p_take
    if (( ! ${#_p_pids[@]} )); then
      _p_show_marks
      [ -z "$_p_over" ] && (( _p_now - _p_busy < _p_idle_s )) || break
      (( _p_now + _p_grace_s < _p_runtime_s )) || break
      tick=0.5
    elif (( _p_now - _p_busy < 2 )); then  # jobs are short
      tick=0.02
    else
      tick=0.2
    fi
    read -r -t "$tick" -u "$_p_tick" _ || (( $? > 128 )) || sleep "$tick"
  done
  _p_show_used
  _p_show_marks
  (( _p_nodes > 1 )) || rm -f -- "pool.$_p_alloc"
  exit 0
}

# Starts an agent on each node, by a step of its own. What one had taken that was killed is free when its
# step has ended, which leaves none of its processes.
_p_run() {
  local n agent file
  local -a pids=()
  (( _p_nodes > 1 )) || _p_main
  cd -- "$_p_directory" || { echo "mantik: there is no pool $_p_directory"; exit 0; }
  shopt -s nullglob
  agent="$(declare -f; declare -p "${!_p_@}")"$'\n''_p_alloc+=+$_p_number; _p_main'
  trap 'kill -s TERM "${pids[@]}"' TERM INT HUP
  trap : USR1 USR2
  for (( n = 0; n < _p_nodes; n++ )); do
    _p_number=$n srun --nodes=1 --ntasks=1 --relative="$n" --cpus-per-task="$_p_cpus" --overlap \
      --mpi=none --cpu-bind=none bash -c "$agent" < /dev/null &
    pids[n]=$!
  done
  while (( ${#pids[@]} )); do
    sleep 1
    for n in "${!pids[@]}"; do
      ! kill -0 "${pids[n]}" 2> /dev/null || continue
      unset "pids[n]"
      cd -- "$_p_directory" 2> /dev/null || :  # it may have been made anew
      for file in run."$_p_alloc+$n".*; do mv -T -- "$file" "done.pool.${file##*.}"; done
    done
  done
  rm -f -- "pool.$_p_alloc"
}
