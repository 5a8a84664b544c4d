#!/usr/bin/env bash
# Runs jaxrank in N processes on this machine, with the code path of a pod or cluster.
#
#   launch/local.sh N [OPTION ...] -- VERB [FLAG ...]
#   launch/local.sh 2 --devices=4 -- train --config=configs/quickstart.py --workdir=/tmp/two
#
#   --devices=1     CPU devices per process
#   --restarts=0    maximum number of restarts of all processes after one has died. Training resumes
#   --dry-run       prints the commands
#
# Standard output is that of process 0. For the others only standard error is shown, and each line
# starts with the index of its process. When one fails, the others are stopped, and the exit status
# is that of the first that failed. Status 2, for invalid flags, config or data, is not retried.
# PYTHON is the interpreter.
options=(devices restarts)
switches=()
devices=1 restarts=0
script_dir=${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}.
# shellcheck source=launch/command.sh
source "$script_dir/command.sh" || exit
parse "$@"
[[ ${#words[@]} == 1 && ${words[0]} =~ ^[1-9][0-9]*$ ]] ||
    die "arguments must be the number of processes, then -- with the verb and flags of jaxrank." \
        "Try --help."
[ ${#rest[@]} -gt 0 ] || die "the verb and flags of jaxrank must follow --. Try --help."
need_whole_numbers devices restarts
processes=${words[0]}
quiet=yes # only jaxrank prints
python=${PYTHON:-python}

free_port() {
    "$python" -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])'
}

jaxrank() { # index of the process, port
    local settings=(JAX_PLATFORMS=cpu "JAX_NUM_CPU_DEVICES=$devices")
    if [ "$processes" -gt 1 ]; then
        settings+=("JAX_COORDINATOR_ADDRESS=127.0.0.1:$2" "JAX_NUM_PROCESSES=$processes"
            "JAX_PROCESS_ID=$1")
    fi
    replace=yes run env "${settings[@]}" "$python" -m jaxrank "${rest[@]}"
}

set -m # each process leads its own group, so that signals reach no other process
groups=()
end() { # signal
    for group in "${groups[@]}"; do
        kill "-$1" -- "-$group" 2>/dev/null || true
    done
}
trap 'end TERM; wait; exit 130' INT
trap 'end TERM; wait; exit 143' TERM
trap 'end TERM; wait; exit 129' HUP

# Runs all processes to their end. Returns the status of the first that failed.
once() {
    local port index ended status=0
    port=$(free_port) || return
    groups=()
    if [ -n "$dry_run" ]; then
        for ((index = 0; index < processes; index++)); do jaxrank "$index" "$port"; done
        return
    fi
    jaxrank 0 "$port" &
    groups+=($!)
    for ((index = 1; index < processes; index++)); do
        # Only jaxrank handles a signal to the group. Its last output is still printed.
        {
            trap : TERM
            jaxrank "$index" "$port" 2>&1 >/dev/null |
                (trap '' TERM && exec sed -u "s/^/[$index] /" >&2)
        } &
        groups+=($!)
    done
    for ((ended = 0; ended < processes; ended++)); do
        wait -n || { status=$? && break; }
    done
    if [ "$status" -eq 127 ] && [ -z "$(jobs -r)" ]; then
        # Processes that ended before `wait` may no longer be jobs, but have a status.
        status=0
        for group in "${groups[@]}"; do wait "$group" || { status=$? && break; }; done
    fi
    if [ "$status" -ne 0 ]; then
        # The others notice the failure within seconds and report it.
        for ((index = 0; index < 10; index++)); do
            [ -n "$(jobs -r)" ] || break
            sleep 1
        done
        end KILL
    fi
    # Waits for each process by its id, or the next `wait -n` would return for it again.
    for group in "${groups[@]}"; do wait "$group" 2>/dev/null || true; done
    groups=()
    return "$status"
}

for ((left = restarts; ; left--)); do
    status=0
    once || status=$?
    if [ "$status" -eq 0 ] || [ "$status" -eq 2 ] || [ "$left" -le 0 ]; then
        exit "$status"
    fi
    say "a process ended with status $status: restarting all processes ($((left - 1)) restarts left)"
done
