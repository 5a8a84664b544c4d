#!/usr/bin/env bash
# Runs jaxrank in P processes of N CPU devices each on this machine: the code path of a pod or of
# several nodes, without one. Standard output is that of process 0; of the others only standard
# error is shown, each line behind the number of its process. When one fails the others are ended,
# and the status is that of the first that failed.
#
#   launch/local_processes.sh 2 4 train --config=configs/quickstart.py --workdir=/tmp/two
set -euo pipefail
if [ $# -lt 3 ] || ! [[ $1 =~ ^[1-9][0-9]*$ && $2 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 PROCESSES DEVICES VERB [ARGUMENT ...]" >&2
    exit 2
fi
processes=$1
devices=$2
shift 2
python=${PYTHON:-python}
port=$("$python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')

run() { # index, arguments of jaxrank
    local index=$1
    shift
    exec env JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES="$devices" \
        JAX_COORDINATOR_ADDRESS="127.0.0.1:$port" JAX_NUM_PROCESSES="$processes" \
        JAX_PROCESS_ID="$index" "$python" -m jaxrank "$@"
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

run 0 "$@" &
groups+=($!)
for ((index = 1; index < processes; index++)); do
    { run "$index" "$@" 2>&1 >/dev/null | sed -u "s/^/[$index] /" >&2; } &
    groups+=($!)
done

status=0
for ((ended = 0; ended < processes; ended++)); do
    wait -n || { status=$? && break; }
done
if [ "$status" -ne 0 ]; then
    # The others learn of it by themselves within seconds, and say so.
    for ((second = 0; second < 10; second++)); do
        [ -n "$(jobs -r)" ] || break
        sleep 1
    done
    end KILL
    wait || true
fi
exit "$status"
