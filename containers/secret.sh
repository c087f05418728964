#!/bin/sh
# Make the key of a stack, containers/secret, or another file: sh containers/secret.sh [FILE]
# Who has it can join the stack. The containers' user must own it, or nobody but root may be able to change it.
set -eu
file=${1:-$(dirname "$0")/secret}
uid=${LAYERZERO_UID:-1000}
umask 077
set -C # an existing key stays
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$file"
case $(id -u) in
"$uid") ;;
0) chown "$uid:$uid" "$file" ;;
*) echo "now, and before each docker compose: export LAYERZERO_UID=$(id -u)" >&2 ;;
esac
