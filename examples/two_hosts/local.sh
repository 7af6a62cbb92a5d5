#!/usr/bin/env bash
# Run both hosts on this machine: a tiny model, two engines with different blocks, and a proxy.
#
# Run this from the repository's root, with vLLM's environment active. It sends one prompt to the
# proxy and to the decode engine alone, and exits with 0 if the two completions are equal.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(mktemp -d)
started=()

# Every part is a separate process group, so that an engine's workers end with it.
finish() {
    local outcome=$?
    if ((outcome)); then
        tail -n 40 "$folder"/*.log >&2 || true
    fi
    for pid in "${started[@]}"; do
        kill -TERM -- "-$pid" 2>/dev/null || true
    done
    wait 2>/dev/null || true
    rm -rf "$folder"
}
trap finish EXIT

# One core for each engine: a thread that spins while it waits would slow the other engine down.
begin() {
    VLLM_CPU_OMP_THREADS_BIND=$2 setsid "$here/serve.sh" "$1" >"$folder/$1.log" 2>&1 &
    started+=("$!")
}

# Wait until the n-th part answers on its port.
await() {
    for ((second = 0; second < 400; second++)); do
        kill -0 "${started[$3]}" 2>/dev/null || break
        if curl --silent --fail --output /dev/null "http://127.0.0.1:$2/health"; then
            return
        fi
        sleep 1
    done
    echo "the $1 does not start:" >&2
    tail -n 60 "$folder/$1.log" >&2
    return 1
}

ask() {
    curl --silent --fail "http://127.0.0.1:$1/v1/completions" \
        --header 'Content-Type: application/json' --data "@$folder/prompt.json"
}

echo "Making a tiny model with random weights."
"${PYTHON:-python3}" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

from examples.vllm_pair import make_model

folder = Path(sys.argv[1])
make_model(folder / "tiny-llama")
prompt = " ".join(f"w{(31 * n + n * n) % 511 + 1}" for n in range(300))
asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
(folder / "prompt.json").write_text(json.dumps(asked | {"model": str(folder / "tiny-llama")}))
PYTHON

cat >"$folder/hosts.env" <<ENV
MODEL=$folder/tiny-llama
PREFILL_HOST=127.0.0.1
DECODE_HOST=127.0.0.1
PROXY_HOST=127.0.0.1
LISTEN_ADDRESS=
PREFILL_PORT=${PREFILL_PORT:-18100}
DECODE_PORT=${DECODE_PORT:-18200}
PROXY_PORT=${PROXY_PORT:-18000}
PREFILL_KV_PORTS=${PREFILL_KV_PORTS:-17600}
DECODE_KV_PORTS=${DECODE_KV_PORTS:-17700}
SECRET_FILE=$folder/secret
TRANSPORT=${TRANSPORT:-shm}
TRANSPORT_OPTIONS='{}'
PREFILL_FLAGS="--dtype float32 --max-model-len 1024 --enforce-eager --no-enable-prefix-caching --block-size 64"
DECODE_FLAGS="--dtype float32 --max-model-len 1024 --enforce-eager --no-enable-prefix-caching --block-size 128"
ENV
# The command vllm of the package vllm-cpu 0.32 fails, because it looks for a package named vllm.
# This wrapper starts the same server.
cat >"$folder/vllm" <<'WRAPPER'
#!/usr/bin/env bash
exec "${PYTHON:-python3}" -m vllm.entrypoints.openai.api_server --model "${@:2}"
WRAPPER
chmod +x "$folder/vllm"
export VLLM=${VLLM:-$folder/vllm}

export HOSTS_ENV=$folder/hosts.env
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} VLLM_NO_USAGE_STATS=1
# shellcheck source=/dev/null
source "$HOSTS_ENV"

"$here/serve.sh" secret
"$here/serve.sh" check
echo "Starting both engines and the proxy."
begin prefill 0
begin decode "$(($(nproc) > 1 ? 1 : 0))"
begin proxy auto
await prefill "$PREFILL_PORT" 0
await decode "$DECODE_PORT" 1
await proxy "$PROXY_PORT" 2

ask "$DECODE_PORT" >"$folder/alone.json"
ask "$PROXY_PORT" >"$folder/both.json"
curl --silent "http://127.0.0.1:$DECODE_PORT/metrics" >"$folder/metrics"
"${PYTHON:-python3}" - "$folder" <<'PYTHON'
import json
import re
import sys
from pathlib import Path

folder = Path(sys.argv[1])
alone, both = (
    json.loads((folder / name).read_text())["choices"][0]["text"]
    for name in ("alone.json", "both.json")
)
pulled = re.search(r"^vllm:kvatlas_pulls_total\S* ([\d.]+)", (folder / "metrics").read_text(), re.M)
count = float(pulled[1]) if pulled else 0.0
print(f"decode alone:  {alone}\nboth engines:  {both}\nrequests read: {count:.0f}")
sys.exit(0 if alone == both and count >= 1 else 1)
PYTHON
echo "The completions are equal."
