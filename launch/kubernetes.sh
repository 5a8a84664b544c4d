#!/usr/bin/env bash
# Runs jaxrank on Kubernetes as a JobSet (https://jobset.sigs.k8s.io, 0.6 or later).
#
#   launch/kubernetes.sh VERB NAME [OPTION ...] [-- VERB AND FLAGS OF JAXRANK]
#   launch/kubernetes.sh tpu ads --image=REGISTRY/jaxrank:tpu --accelerator=tpu-v5-lite-podslice \
#       --topology=4x4 --hosts=4 --chips=4 --claim=shared \
#       -- train --config=configs/standard.py --workdir=/mnt/jaxrank/standard
#   launch/kubernetes.sh gpu ads --image=REGISTRY/jaxrank:cuda --nodes=2 --gpus=8 --claim=shared \
#       -- train --config=configs/standard.py --workdir=/mnt/jaxrank/standard
#
# Verbs:
#   tpu gpu  applies launch/jobset_tpu.yaml or launch/jobset_gpu.yaml
#   status   prints the state of the JobSet and its pods
#   logs     follows the log of the first pod
#   delete   deletes the JobSet after a confirmation
#
#   --image=IMAGE           built from the Dockerfile of this repository
#   --claim=CLAIM           a volume that all nodes can write, mounted at /mnt/jaxrank
#   --restarts=10           maximum number of restarts of all pods, after which training resumes.
#                           JobSet does not distinguish preemptions from failures, so set it to the
#                           number of preemptions that a long run on spot nodes may have
#   --accelerator=TYPE --topology=TOPOLOGY   of a slice, with the names of GKE
#   --slices=1 --hosts=1 --chips=4           slices, hosts per slice, chips per host
#   --nodes=1 --gpus=1                       GPU nodes, and GPUs per node
#   --node-selector=KEY=VALUE                selects GPU nodes
#   --namespace=NAMESPACE
#   --template=FILE         used instead of the manifest in launch/
#   --yes                   deletes without a confirmation
#   --dry-run               prints every command and the manifest
options=(image claim restarts accelerator topology slices hosts chips nodes gpus node-selector
    namespace template)
switches=()
image='' claim='' restarts=10 accelerator='' topology='' slices=1 hosts=1 chips=4 nodes=1 gpus=1
node_selector='' namespace='' template=''
script_dir=${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}.
# shellcheck source=launch/command.sh
source "$script_dir/command.sh" || exit
parse "$@"
[ ${#words[@]} -eq 2 ] || die "arguments must be a verb and a name: found '${words[*]-}'. Try --help."
verb=${words[0]} name=${words[1]}
need_name "$name"

kube() {
    run kubectl "$@" ${namespace:+--namespace="$namespace"}
}

# Prints text as a JSON string, which is valid in YAML too.
json() {
    local text=$1
    [[ $text != *[[:cntrl:]]* ]] ||
        die "arguments must not contain control characters: found $(quoted "$text")."
    text=${text//\\/\\\\}
    printf '"%s"' "${text//\"/\\\"}"
}

arguments() {
    local word line=''
    for word in "${rest[@]}"; do
        word=$(json "${word//\$/\$\$}") || return # Kubernetes would expand $(NAME)
        line+=", $word"
    done
    printf '[%s]' "${line#, }"
}

selector() {
    local key value
    [ -z "$node_selector" ] && echo '{}' && return
    [[ $node_selector == ?*=?* ]] || die "--node-selector: must be KEY=VALUE: found '$node_selector'."
    key=$(json "${node_selector%%=*}") && value=$(json "${node_selector#*=}") || return
    printf '{%s: %s}' "$key" "$value"
}

fill() { # manifest, then words and values in turn
    local text
    text=$(<"$1")
    shift
    while [ $# -gt 0 ]; do
        text=${text//"@$1@"/"$2"}
        shift 2
    done
    printf %s "$text"
}

apply() { # manifest, words and values
    local manifest=${template:-$script_dir/$1} args quoted_image quoted_claim input
    shift
    need image claim
    [ ${#rest[@]} -gt 0 ] || die "the verb and flags of jaxrank must follow --. Try --help."
    args=$(arguments) && quoted_image=$(json "$image") && quoted_claim=$(json "$claim") || exit
    input=$(fill "$manifest" "$@" NAME "$name" RESTARTS "$restarts" IMAGE "$quoted_image" \
        CLAIM "$quoted_claim" ARGS "$args")
    kube apply --filename=-
}

need_whole_numbers restarts slices hosts chips nodes gpus
pods=jobset.sigs.k8s.io/jobset-name=$name
case $verb in
tpu)
    need accelerator topology
    accelerator=$(json "$accelerator")
    topology=$(json "$topology")
    apply jobset_tpu.yaml ACCELERATOR "$accelerator" TOPOLOGY "$topology" SLICES "$slices" \
        HOSTS "$hosts" CHIPS "$chips"
    ;;
gpu)
    node_selector=$(selector)
    apply jobset_gpu.yaml NODES "$nodes" GPUS "$gpus" SELECTOR "$node_selector"
    ;;
status)
    kube get jobset "$name"
    kube get pods --selector="$pods" --output=wide
    ;;
logs)
    first=$pods,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0
    kube logs --selector="$first" --tail=100 --follow
    ;;
delete)
    confirm "Delete the JobSet $name and its pods?"
    kube delete jobset "$name"
    ;;
*) die "unknown verb '$verb'. Try --help." ;;
esac
