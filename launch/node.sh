#!/usr/bin/env bash
# Runs jaxrank as one of several processes that a scheduler for PyTorch starts.
# Converts the environment variables of torchrun to the variables of JAX.
#
#   launch/node.sh [OPTION ...] -- VERB [FLAG ...]
#   MASTER_ADDR=node0 MASTER_PORT=1234 NNODES=2 NODE_RANK=0 launch/node.sh -- train ...
#   torchrun --nnodes=2 --nproc-per-node=8 --no-python ... launch/node.sh -- train ...
#
#   MASTER_ADDR, MASTER_PORT  of the first process, required
#   WORLD_SIZE, RANK          number of processes, and index of this process
#   LOCAL_RANK                index of the GPU that this process uses. Unset: all GPUs
#   NNODES, NODE_RANK         used if WORLD_SIZE and RANK are not set
#
#   --port=PORT        port of the first process. Default: MASTER_PORT, or MASTER_PORT + 1 under
#                      torchrun, which listens on MASTER_PORT itself
#   --program=jaxrank
#   --dry-run          prints the command
options=(port program)
switches=()
port='' program=jaxrank
script_dir=${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}.
# shellcheck source=launch/command.sh
source "$script_dir/command.sh" || exit
parse "$@"
[ ${#words[@]} -eq 0 ] || die "unknown argument '${words[0]}'. Try --help."
[ ${#rest[@]} -gt 0 ] || die "the verb and flags of jaxrank must follow --. Try --help."

number=${WORLD_SIZE:-${NNODES-}}
index=${RANK:-${NODE_RANK-}}
[[ -n ${MASTER_ADDR-} && -n $number && -n $index && -n ${MASTER_PORT-}$port ]] ||
    die "MASTER_ADDR, MASTER_PORT, and WORLD_SIZE and RANK or NNODES and NODE_RANK must be set:" \
        "found '${MASTER_ADDR-}', '${MASTER_PORT-}', '$number' and '$index'."
if [ -z "$port" ]; then
    port=$MASTER_PORT
    [ "${TORCHELASTIC_USE_AGENT_STORE-}" != True ] || port=$((port + 1))
fi
quiet=yes # only jaxrank prints
replace=yes run env JAX_COORDINATOR_ADDRESS="$MASTER_ADDR:$port" JAX_NUM_PROCESSES="$number" \
    JAX_PROCESS_ID="$index" ${LOCAL_RANK:+JAX_LOCAL_DEVICE_IDS="$LOCAL_RANK"} \
    "$program" "${rest[@]}"
