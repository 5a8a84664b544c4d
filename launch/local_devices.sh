#!/usr/bin/env bash
# Runs jaxrank on N devices of this machine's CPU: the code path of a pod or node, without one.
#
#   launch/local_devices.sh 8 train --config=configs/quickstart.py --workdir=/tmp/eight
set -euo pipefail
if [ $# -lt 2 ] || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 DEVICES VERB [ARGUMENT ...]" >&2
    exit 2
fi
devices=$1
shift
exec env JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES="$devices" "${PYTHON:-python}" -m jaxrank "$@"
