#!/usr/bin/env bash
# Runs jaxrank as one of several processes that are told of each other as torchrun tells its own:
# turns their variables into JAX's. For schedulers that were made for PyTorch.
#
#   launch/node.sh [OPTION ...] -- VERB [FLAG ...]
#   MASTER_ADDR=node0 MASTER_PORT=1234 NNODES=2 NODE_RANK=0 launch/node.sh -- train ...
#   torchrun --nnodes=2 --nproc-per-node=8 --no-python ... launch/node.sh -- train ...
#
#   MASTER_ADDR, MASTER_PORT  of the first process; must be set
#   WORLD_SIZE, RANK          processes, and which this is
#   LOCAL_RANK                the one GPU that this process takes; it takes all if unset
#   NNODES, NODE_RANK         the same as WORLD_SIZE and RANK, where those are not set
#
#   --port=PORT        in place of MASTER_PORT, on which torchrun itself listens: then MASTER_PORT + 1
#   --program=jaxrank
#   --dry-run          prints the command
options=(port program)
switches=()
port='' program=jaxrank
here=${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}.
# shellcheck source=launch/command.sh
source "$here/command.sh" || exit
parse "$@"
[ ${#words[@]} -eq 0 ] || die "unknown argument '${words[0]}'. Try --help."
[ ${#rest[@]} -gt 0 ] || die "what jaxrank does must be given behind --. Try --help."

number=${WORLD_SIZE:-${NNODES-}}
index=${RANK:-${NODE_RANK-}}
[[ -n ${MASTER_ADDR-} && -n $number && -n $index && -n ${MASTER_PORT-}$port ]] ||
    die "MASTER_ADDR, MASTER_PORT, and WORLD_SIZE and RANK or NNODES and NODE_RANK must be set:" \
        "found '${MASTER_ADDR-}', '${MASTER_PORT-}', '$number' and '$index'."
if [ -z "$port" ]; then
    port=$MASTER_PORT
    [ "${TORCHELASTIC_USE_AGENT_STORE-}" != True ] || port=$((port + 1))
fi
quiet=yes # the output is jaxrank's
replace=yes run env JAX_COORDINATOR_ADDRESS="$MASTER_ADDR:$port" JAX_NUM_PROCESSES="$number" \
    JAX_PROCESS_ID="$index" ${LOCAL_RANK:+JAX_LOCAL_DEVICE_IDS="$LOCAL_RANK"} \
    "$program" "${rest[@]}"
