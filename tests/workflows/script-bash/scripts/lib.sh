say() { printf "<%s>" "$@"; echo; }
