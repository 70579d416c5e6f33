# ---- heartbeat -----------------------------------------------------------------------------------
# Samples the memory of this job on this node, in bytes, and keeps the most in the file `memory`.
# Bash alone reads it: a sample of a job with 10 processes costs about 2 ms. Where Slurm has made a
# control group for the job, the kernel's number counts; else the sum of the resident memory of the
# processes below the script, or the most that one of them ever had, if that is more. What Slurm's
# launcher starts is not below the script: with it and without a control group it is unknown.
_m_sample_memory() {
  local pid line key value file text most=0 sum=0 number=0
  local -a left=("$$") lines=()
  if [ -n "$_m_memory_stat" ] && mapfile -t lines < "$_m_memory_stat"; then
    for line in "${lines[@]}"; do
      key=${line%% *} value=${line##* }
      case $key in anon | shmem | total_rss | total_shmem) (( sum += value )) ;; esac
    done
  else
    while (( ${#left[@]} )); do
      pid=${left[0]} left=("${left[@]:1}")
      [ "$pid" != "$BASHPID" ] && mapfile -t lines < "/proc/$pid/status" || continue
      text=" ${lines[*]} "
      [[ $text != *" Name:"?"srun "* ]] && (( number++ < 256 )) || return
      if [[ $text =~ VmHWM:[[:space:]]*([0-9]+) ]]; then
        (( most = BASH_REMATCH[1] > most ? BASH_REMATCH[1] : most ))
      fi
      if [[ $text =~ VmRSS:[[:space:]]*([0-9]+) ]]; then (( sum += BASH_REMATCH[1] )); fi
      for file in "/proc/$pid/task/"[0-9]*/children; do
        read -r -a lines < "$file"
        left+=("${lines[@]}")
      done
    done
    (( sum = (most > sum ? most : sum) * 1024 ))
  fi
  if (( sum > _m_most )); then
    _m_most=$sum
    _m_replace "$_m_work/memory" "$sum"
  fi
} 2>/dev/null

# Sets _m_memory_stat to the kernel's account of the job's memory in its control group, if any.
_m_find_group() {
  local line path root
  _m_memory_stat='' _m_most=0
  [ -n "${SLURM_JOB_ID-}" ] && [ -z "${_m_pooled-}" ] || return  # a pool's is that of all its jobs
  while IFS= read -r line; do
    path=${line#*:*:}
    case $line in
      0::*"/job_$SLURM_JOB_ID/"* | *:memory:*"/job_$SLURM_JOB_ID/"*)
        path=${path%%"/job_$SLURM_JOB_ID/"*}/job_$SLURM_JOB_ID
        for root in /sys/fs/cgroup /sys/fs/cgroup/memory; do
          if [ -r "$root$path/memory.stat" ]; then _m_memory_stat=$root$path/memory.stat; fi
        done ;;
    esac
  done < /proc/self/cgroup
} 2>/dev/null

# Runs each command that `smk-mantik exec` has left below `exec`, once, beside the job's own command
# and outside its container: NAME.sh becomes NAME.begun, its output NAME.out, its exit code NAME.code.
_m_run_asked() {
  local pid file
  for pid in "${!asked[@]}"; do
    ! kill -0 "$pid" 2>/dev/null || continue
    wait "$pid"
    _m_replace "${asked[pid]}.code" "$?"
    unset "asked[$pid]"
  done
  for file in "$_m_work/exec/"*.sh; do
    # Others may write to a shared workspace: only the user's own commands run.
    [ -f "$file" ] && [ -O "$file" ] && mv -f -- "$file" "${file%.sh}.begun" || continue
    file=${file%.sh}
    bash "$file.begun" > "$file.out" 2>&1 < /dev/null &
    asked[$!]=$file
  done
}

# Appends to the claim while the script runs. Reads from a pipe that only the script holds open: the
# heartbeat ends at once when the script ends or is killed, and leaves no process behind. The first
# samples come sooner: many jobs are short. If a look at what is shown still runs when the next one is
# due, it continues, and the interval between looks doubles.
_m_heartbeat() {
  local beat=$SECONDS sample=$SECONDS look=$SECONDS pause=1 looking='' next pid
  local -a asked=()
  trap '' TERM INT HUP USR1 USR2
  _m_find_group
  [ -z "${_m_gpus_wanted-}" ] || _m_begin_gpus
  while :; do
    (( next = beat + _m_heartbeat_s ))
    (( next = sample + pause < next ? sample + pause : next ))
    [ -z "${_m_live-}" ] || (( next = look + _m_live_s < next ? look + _m_live_s : next ))
    (( ! ${#asked[@]} )) || next=$SECONDS
    next=$(( next - SECONDS ))
    read -r -t "$(( next > 0 ? next : 1 ))" _
    case $? in
      0) _m_end_gpus ;;
      1) break ;;
    esac
    _m_run_asked
    if (( SECONDS >= beat + _m_heartbeat_s )); then
      beat=$SECONDS
      [ -f "$_m_claim" ] && printf . >> "$_m_claim"
    fi
    if (( SECONDS >= sample + pause )); then
      sample=$SECONDS
      (( pause = 2 * pause < _m_heartbeat_s ? 2 * pause : _m_heartbeat_s ))
      _m_sample_memory
      _m_sample_gpus
    fi
    [ -n "${_m_live-}" ] && (( SECONDS >= look + _m_live_s )) || continue
    look=$SECONDS
    if [ -n "$looking" ] && kill -0 "$looking" 2>/dev/null; then
      (( _m_live_s *= 2 ))
    elif [ ! -e "$_m_work/live/full" ]; then
      _m_look < /dev/null &
      looking=$!
    fi
  done
  _m_end_gpus
  [ -z "$looking" ] || kill -s KILL "$looking" 2>/dev/null
  for pid in "${!asked[@]}"; do kill -s KILL -- "-$pid" 2>/dev/null; done
}

# ---- GPUs ----------------------------------------------------------------------------------------
# Samples how busy the job's GPUs on this node are, in percent. One process prints a number per GPU
# and interval into a pipe, of which heartbeats read what is there: a driver that hangs delays
# nothing. nvidia-smi stays alive between its samples, as its start costs more CPU time than they
# do; so does AMD's rocm-smi, whose source, the kernel's files, is read instead. The file `gpus`
# gets the sum and the number of the samples.

_m_print_gpus() {
  local device node busy index drm=${_m_drm:-/sys/class/drm} dri=${_m_dri:-/dev/dri}
  local -a chosen=() cards=() wanted=()
  if command -v nvidia-smi > /dev/null; then
    case ${CUDA_VISIBLE_DEVICES-} in
      '' | *[!0-9A-Za-z,-]* | *MIG*) ;;
      *) chosen=("--id=$CUDA_VISIBLE_DEVICES") ;;
    esac
    exec stdbuf -oL nvidia-smi ${chosen[@]+"${chosen[@]}"} --format=csv,noheader,nounits \
      --query-gpu=utilization.gpu --loop="$_m_heartbeat_s"
  fi
  for device in "$drm"/card*/device; do
    # Of the other cards, the scheduler's control group denies the device.
    [ -r "$device/gpu_busy_percent" ] || continue
    for node in "$device"/drm/renderD*; do
      if { : < "$dri/${node##*/}"; } 2>/dev/null; then cards+=("$device/gpu_busy_percent"); fi
    done
  done
  case ${ROCR_VISIBLE_DEVICES-} in
    '' | *[!0-9,]*) wanted=("${!cards[@]}") ;;
    *) IFS=, read -r -a wanted <<< "$ROCR_VISIBLE_DEVICES" ;;
  esac
  while (( ${#cards[@]} )); do
    for index in "${wanted[@]}"; do
      if read -r busy < "${cards[index]-}"; then printf '%s\n' "$busy"; fi
    done
    sleep "$_m_heartbeat_s"
  done
}

_m_begin_gpus() {
  _m_gpus='' _m_gpu_sum=0 _m_gpu_n=0 _m_gpu_step=0
  exec {_m_gpus}< <(echo "$BASHPID"; _m_print_gpus < /dev/null 2>/dev/null)
  read -r -t 5 -u "$_m_gpus" _m_gpu_process
}

# Reads the samples that are there.
_m_sample_gpus() {
  local busy number=0 sum=0 n=0
  [ -n "${_m_gpus-}" ] || return
  while (( number++ < 1000 )) && read -t 0 -u "$_m_gpus"; do
    read -r -t 1 -u "$_m_gpus" busy
    case $? in
      0) ;;
      # It has ended: its number may become another process's.
      1) exec {_m_gpus}<&-; _m_gpus='' _m_gpu_process=; break ;;
      *) break ;;
    esac
    # A line of an error, or of what a GPU does not report, is no sample.
    case $busy in '' | ????* | *[!0-9]*) ;; *) (( sum += busy, n++ )) ;; esac
  done
  (( n )) || return
  (( _m_gpu_sum += sum, _m_gpu_n += n ))
  _m_replace "$_m_work/gpus" "$_m_gpu_sum $_m_gpu_n"
  # In the format of MLflow's file store: time in ms, value, step. What is there before the command
  # starts is not shown while the job runs.
  [ -n "${_m_gpu_metrics-}" ] && [ -e "$_m_work/live/seen" ] &&
    mkdir -p -- "$_m_gpu_metrics/system" || return
  _m_now; busy=${_m_time/./}
  printf '%s\n' "${busy:0:13} $(( sum / n )) $(( _m_gpu_step++ ))" \
    >> "$_m_gpu_metrics/system/gpu_utilization_percentage"
} 2>/dev/null

# Ends the sampling, in the process of the heartbeat.
_m_end_gpus() {
  [ -n "${_m_gpus_wanted-}" ] || return
  _m_sample_gpus
  [ -z "$_m_gpu_process" ] || kill -s KILL "$_m_gpu_process"
  [ -z "$_m_gpus" ] || exec {_m_gpus}<&-
  _m_gpus='' _m_gpu_process=
  : > "$_m_work/gpus.end"
} 2>/dev/null

# Has the heartbeat end it: nothing may change what the job made while it is listed. Does not wait
# long for a heartbeat that hangs.
_m_settle_gpus() {
  local i
  ( printf 'end\n' >&"$_m_beat" ) 2>/dev/null  # if the heartbeat was killed, this dies, too
  for (( i = 0; i < 40; i++ )); do
    [ ! -e "$_m_work/gpus.end" ] || break
    sleep 0.05
  done
  { read -r _m_gpu_use < "$_m_work/gpus"; } 2>/dev/null
}

