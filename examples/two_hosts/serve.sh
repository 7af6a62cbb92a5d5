#!/usr/bin/env bash
# Run prefill on one host, decode on another, and a proxy in front of both.
#
#   serve.sh secret             create the secret file; copy it to the other host
#   serve.sh check              check that the two engines can exchange caches; takes doctor's options
#   serve.sh prefill            on the prefill host
#   serve.sh decode             on the decode host
#   serve.sh proxy              on either, or on a third
#
# With --dry-run, print the command instead of running it. The settings are in hosts.env.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=hosts.env
source "${HOSTS_ENV:-$here/hosts.env}"

role=${1:-}
dry_run=${2:-}

usage() {
    sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

# The flag with which an engine takes the connector: its own host, and its first port.
connector() {
    local listen=${LISTEN_ADDRESS:-$1}
    printf '{"kv_connector": "KVAtlasConnector", "kv_connector_module_path": "kvatlas.engines.vllm", '
    printf '"kv_role": "kv_both", "kv_load_failure_policy": "recompute", '
    printf '"kv_connector_extra_config": {"transport": "%s", "transport_options": %s, ' \
        "$TRANSPORT" "$TRANSPORT_OPTIONS"
    printf '"listen": "%s", "advertise": "%s", "ports": %s, "secret_file": "%s"}}' \
        "$listen" "$1" "$2" "$SECRET_FILE"
}

# The command line of an engine: its host, HTTP port, first port of its ranks, and more flags.
engine() {
    local flags
    read -r -a flags <<<"$4"
    command=("${VLLM:-vllm}" serve "$MODEL" --host "${LISTEN_ADDRESS:-$1}" --port "$2"
        --kv-transfer-config "$(connector "$1" "$3")" "${flags[@]}")
}

run() {
    if [[ $dry_run == --dry-run ]]; then
        printf '%q ' "${command[@]}"
        printf '\n'
    else
        exec "${command[@]}"
    fi
}

case $role in
prefill)
    engine "$PREFILL_HOST" "$PREFILL_PORT" "$PREFILL_KV_PORTS" "$PREFILL_FLAGS"
    run
    ;;
decode)
    engine "$DECODE_HOST" "$DECODE_PORT" "$DECODE_KV_PORTS" "$DECODE_FLAGS"
    run
    ;;
proxy)
    command=("${PYTHON:-python3}" "$here/proxy.py" --listen "${LISTEN_ADDRESS:-$PROXY_HOST}:$PROXY_PORT"
        --prefill "http://$PREFILL_HOST:$PREFILL_PORT" --decode "http://$DECODE_HOST:$DECODE_PORT")
    run
    ;;
check)
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    "${BASH_SOURCE[0]}" prefill --dry-run >"$folder/prefill.sh"
    "${BASH_SOURCE[0]}" decode --dry-run >"$folder/decode.sh"
    "${PYTHON:-python3}" -m kvatlas doctor "$folder/prefill.sh" "$folder/decode.sh" "${@:2}"
    ;;
secret)
    if [[ -e $SECRET_FILE ]]; then
        echo "$SECRET_FILE is there already" >&2
        exit 1
    fi
    (umask 077 && mkdir -p "$(dirname "$SECRET_FILE")" && head -c 32 /dev/urandom | base64 >"$SECRET_FILE")
    echo "Wrote $SECRET_FILE: copy it to the other host, for the engines' user alone."
    ;;
*) usage ;;
esac
