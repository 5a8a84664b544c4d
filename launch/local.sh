#!/usr/bin/env bash
# Runs jaxrank in N processes on this machine: the code path of a pod or node, without one.
#
#   launch/local.sh N [OPTION ...] -- VERB [FLAG ...]
#   launch/local.sh 2 --devices=4 -- train --config=configs/quickstart.py --workdir=/tmp/two
#
#   --devices=1     CPU devices of each process
#   --restarts=0    how often all are started again after one has died; training then resumes
#   --dry-run       prints what it would run
#
# Standard output is that of process 0; of the others only standard error is shown, each line behind
# the number of its process. When one fails the others are ended, and the status is that of the
# first that failed. Status 2, for wrong flags, config or data, is never tried again.
# PYTHON names the interpreter.
options=(devices restarts)
switches=()
devices=1 restarts=0
here=${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}.
# shellcheck source=launch/command.sh
source "$here/command.sh" || exit
parse "$@"
[[ ${#words[@]} == 1 && ${words[0]} =~ ^[1-9][0-9]*$ ]] ||
    die "the number of processes must be given, and what jaxrank does behind --. Try --help."
[ ${#rest[@]} -gt 0 ] || die "what jaxrank does must be given behind --. Try --help."
need_whole_numbers devices restarts
processes=${words[0]}
quiet=yes # the output is jaxrank's
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

set -m # each process leads a group of its own, so that nothing else is ever ended
groups=()
end() { # signal
    for group in "${groups[@]}"; do
        kill "-$1" -- "-$group" 2>/dev/null || true
    done
}
trap 'end TERM; wait; exit 130' INT
trap 'end TERM; wait; exit 143' TERM
trap 'end TERM; wait; exit 129' HUP

# Runs all processes to their end; returns the status of the first that failed.
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
        # A signal to the group is for jaxrank alone: what it still says is shown, and waited for.
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
        # Those that ended before they were waited for may be no jobs any more, but have a status.
        status=0
        for group in "${groups[@]}"; do wait "$group" || { status=$? && break; }; done
    fi
    if [ "$status" -ne 0 ]; then
        # The others learn of it by themselves within seconds, and say so.
        for ((index = 0; index < 10; index++)); do
            [ -n "$(jobs -r)" ] || break
            sleep 1
        done
        end KILL
    fi
    # Each by its name, or `wait -n` would find them again when it waits for the next ones.
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
    say "a process ended with status $status; all are started again ($((left - 1)) restarts left)"
done
